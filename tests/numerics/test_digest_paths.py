"""Each way to compute a digest notices each mutation (L1): leaves, torch's own operators."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gtrainer import digest
from pytest_gtrainer.numerics.digest import mix128
from tests.numerics.samples import ALL, flip_bit

PATHS = {
    "one leaf": ("xxh3_128", 4 << 20),
    "leaves": ("xxh3_128", 16),
    "sha256, leaves": ("sha256", 16),
    "mix128": ("mix128", 4 << 20),
    "mix128, leaves": ("mix128", 16),
}
State = dict[str, torch.Tensor]


def on_path(path: str, value, **options) -> str:
    algorithm, leaf = PATHS[path]
    with mock.patch("pytest_gtrainer.numerics.digest._LEAF", leaf):
        return digest(value, algorithm=algorithm, **options)


def words_of(words: list[int]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)


def _flipped(state: State, i: int, j: int) -> None:
    flip_bit(state["a"], i, j % 31)


def _swapped(state: State, i: int, j: int) -> None:
    state["a"].view(torch.int32)[[i, j]] = state["a"].view(torch.int32)[[j, i]]


def _swapped_between_tensors(state: State, i: int, j: int) -> None:
    state["a"], state["b"] = state["b"], state["a"]


def _renamed(state: State, i: int, j: int) -> None:
    state["c"] = state.pop("b")


def _moved_to_the_neighbour(state: State, i: int, j: int) -> None:
    """Equal values moved: the same bytes in a row, cut elsewhere."""
    row, cut = torch.cat([state["a"], state["b"]]), len(state["a"])
    state["a"], state["b"] = row[: cut - 1], row[cut - 1 :]


def _reshaped(state: State, i: int, j: int) -> None:
    state["a"] = state["a"].unsqueeze(0)


def _retyped(state: State, i: int, j: int) -> None:
    state["a"] = state["a"].view(torch.int32)


def _padded(state: State, i: int, j: int) -> None:
    state["a"] = torch.cat([state["a"], torch.zeros(1)])


MUTATIONS = (
    _flipped,
    _swapped,
    _swapped_between_tensors,
    _renamed,
    _moved_to_the_neighbour,
    _reshaped,
    _retyped,
    _padded,
)
WORDS = st.lists(st.integers(0, 2**32 - 1), min_size=12, max_size=30, unique=True)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__.strip("_"))
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=10)
@given(words=WORDS, data=st.data())
def test_every_mutation_changes_it(
    path: str, mutate: Callable[[State, int, int], None], words, data
):
    """L1"""
    cut = data.draw(st.integers(2, len(words) - 2))
    places = st.integers(0, cut - 1)
    i, j = data.draw(st.lists(places, min_size=2, max_size=2, unique=True))
    state = {"a": words_of(words[:cut]), "b": words_of(words[cut:])}
    mutated = {name: tensor.clone() for name, tensor in state.items()}
    mutate(mutated, i, j)
    assert on_path(path, mutated) != on_path(path, state)
    assert on_path(path, {name: tensor.clone() for name, tensor in state.items()}) == on_path(
        path, state
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_strided_and_not(path: str, dtype: torch.dtype):
    """L2"""
    grid = (torch.arange(40) % 3).reshape(5, 8).to(dtype)
    assert (
        on_path(path, grid)
        == on_path(path, grid.t().contiguous().t())
        == on_path(path, grid.clone())
    )
    assert on_path(path, grid.t()) == on_path(path, grid.t().contiguous()) != on_path(path, grid)
    assert on_path(path, grid[:0]) != on_path(path, grid[:, :0])


@pytest.mark.parametrize("offset", range(8))
def test_mixing_does_not_depend_on_where_the_bytes_lie(offset: int):
    row = torch.arange(64, dtype=torch.uint8)
    assert mix128(row[offset : offset + 40]) == mix128(row[offset : offset + 40].clone())


def test_mixing_agrees_with_a_plain_loop():
    """splitmix64's finaliser, word by word in Python."""
    ones = 2**64 - 1

    def mixed(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & ones
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & ones
        return word ^ (word >> 31)

    words = torch.tensor([5, -3, 2**62, 0])
    expected = b""
    for constant in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        total = sum(
            mixed(word & ones ^ mixed(at * constant & ones))
            for at, word in enumerate(words.tolist(), 1)
        )
        expected += (total & ones).to_bytes(8, "little")
    assert mix128(words.view(torch.uint8)) == expected


def test_a_model_of_equal_leaves_in_another_order():
    """Leaves are hashed apart, but their order counts."""
    a, b = torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)
    assert on_path("leaves", torch.cat([a, b])) != on_path("leaves", torch.cat([b, a]))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("one leaf", "xxh3_128:4f4d352d7c9810e15a103321ebddf402"),
        ("leaves", "xxh3_128:3fec367c4c234982595c0b5ec0e8fd38"),
        (
            "sha256, leaves",
            "sha256:3a59ba5e4ab19412872ed68d1d52ae50a26643c6afe705e674dce1a8d9a20c86",
        ),
        ("mix128", "mix128:9bc6b1eb518fb9b47fdd09c44b176e4a"),
        ("mix128, leaves", "mix128:6c19343a88274c0a54071417c437929c"),
    ],
)
def test_digests_stay_what_they_are(path: str, expected: str):
    """They stand in goldens: another version of this package that gives others would spoil them."""
    assert (
        on_path(path, {"w": torch.arange(40.0), "b": torch.ones(3, 1, dtype=torch.bfloat16)})
        == expected
    )


def test_an_unknown_scope_names_the_choices():
    with pytest.raises(
        ValueError, match=r"unknown scope 'all' of a digest: local \(the shard\) or global"
    ):
        digest(torch.ones(1), scope="all")


@pytest.mark.gt_world("ranks", size=3)
def test_local_and_global_digests_of_a_sharded_model(gt_mesh, gt_world):
    """L1: uneven shards; each rank has the digest of the model before it was sharded."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    before, alone = (
        digest(model),
        [digest({name: weight}) for name, weight in model.named_parameters()],
    )
    fully_shard(model, mesh=gt_mesh)
    assert digest(model, scope="global") == before
    assert [
        digest({name: weight}, scope="global") for name, weight in model.named_parameters()
    ] == alone
    local = [None] * gt_world.size
    torch.distributed.all_gather_object(local, digest(model))
    assert len({before, *local}) == 4
