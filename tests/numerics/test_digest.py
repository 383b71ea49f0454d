"""A digest notices each change of bits (L1), for each kind of tensor (L2)."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pytest_gtrainer import Record, digest
from pytest_gtrainer.numerics.bits import NoBytes
from pytest_gtrainer.numerics.record import entries
from tests.numerics.samples import ALL, flip_bit, make_run, unhurried

BITS32 = st.integers(0, 2**32 - 1)
WORDS = st.lists(BITS32, min_size=2, max_size=40)


def _floats(words: list[int]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)


@unhurried
@given(WORDS, st.data())
def test_one_flipped_bit_changes_it(words: list[int], data: st.DataObject):
    """L1: any bit pattern, NaN payloads and signs of zero among them."""
    before = _floats(words)
    after = before.clone()
    flip_bit(after, data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 30)))
    assert digest(after) != digest(before)


@unhurried
@given(WORDS, st.data())
def test_a_swapped_pair_changes_it(words: list[int], data: st.DataObject):
    """L1"""
    i, j = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    assert (digest(_floats(swapped)) == digest(_floats(words))) == (swapped == words)


@unhurried
@given(WORDS, st.data())
def test_values_moved_between_tensors_change_it(words: list[int], data: st.DataObject):
    """L1: the same bytes in the same order, cut elsewhere."""
    cuts = data.draw(st.lists(st.integers(0, len(words)), min_size=2, max_size=2, unique=True))
    first, second = ({"a": _floats(words[:cut]), "b": _floats(words[cut:])} for cut in cuts)
    assert digest(first) != digest(second)


@unhurried
@given(
    st.dictionaries(st.text(min_size=1, max_size=5), WORDS, min_size=2, max_size=4), st.randoms()
)
def test_another_order_of_tensors_changes_it(words: dict[str, list[int]], random):
    """L1: in order."""
    state = {f"p.{name}": _floats(values) for name, values in words.items()}
    names = list(state)
    random.shuffle(names)
    shuffled = {name: state[name] for name in names}
    assert (digest(shuffled) == digest(state)) == (names == list(state))


@unhurried
@given(WORDS, st.text(max_size=8), st.text(max_size=8))
def test_another_name_changes_it(words: list[int], a: str, b: str):
    """L1"""
    one, other = ({f"weight{name}": _floats(words)} for name in (a, b))
    assert (digest(one) == digest(other)) == (a == b)


@unhurried
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_another_shape_of_the_same_bytes_changes_it(a: list[int], b: list[int]):
    """L1: a transposed shape, an added dimension of extent 1, an empty tensor's shape."""
    assert (digest(torch.zeros(a)) == digest(torch.zeros(b))) == (a == b)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (_floats([0x7FC00000]), _floats([0x7FC00001])),
        (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float32)),
        (torch.ones(4, dtype=torch.int16), torch.ones(4, dtype=torch.uint16)),
        (torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(3, 2)),
        (torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3).t()),
        (torch.zeros(1), torch.zeros(())),
        (torch.zeros(0), torch.zeros(0, 1)),
        (torch.ones(4).view(torch.int32), torch.ones(4)),
    ],
    ids=["zero", "nan", "bf16", "unsigned", "shape", "transposed", "0-dim", "empty", "viewed"],
)
def test_the_listed_mutations_change_it(before: torch.Tensor, after: torch.Tensor):
    """L1"""
    assert digest(before) != digest(after)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()], ids=str)
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]):
    """L2"""
    zeros, ones = torch.zeros(shape).to(dtype), torch.ones(shape).to(dtype)
    assert digest(zeros) == digest(zeros.clone())
    assert (digest(zeros) == digest(ones)) == (zeros.numel() == 0)


def test_strides_do_not_count():
    """L2: the same elements at other places in memory."""
    base = torch.randn(4, 6)
    assert digest(base.t()) == digest(base.t().contiguous())
    assert digest(base[:, ::2]) == digest(base[:, ::2].clone())
    assert digest(base[1:3]) == digest(base[1:3].clone())


class Model(nn.Module):
    """Tied weights, a persistent and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_a_module_gives_tied_weights_and_every_buffer():
    """L1, L2"""
    names = [key.name for key in entries(Model())]
    assert names == ["embedding.weight", "head.weight", "steps", "scratch"]


@pytest.mark.parametrize("name", ["embedding.weight", "steps", "scratch"])
def test_any_bit_of_a_module_changes_it(name: str):
    """L1"""
    model = Model()
    before = digest(model)
    with torch.no_grad():
        flip_bit(model.get_parameter(name) if "weight" in name else model.get_buffer(name))
    assert digest(model) != before


def test_untied_weights_of_the_same_values_do_not_matter_but_their_names_do():
    model = Model()
    before = digest(model)
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    assert digest(model) == before


def test_wrappers_do_not_matter():
    model = nn.Sequential(nn.Linear(2, 2))
    assert digest(nn.ModuleDict({"module": model})) == digest(model)
    assert digest(nn.ModuleDict({"_orig_mod": model})) == digest(model)


def test_a_dtensor_gives_its_local_shard():
    """L2"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        local = torch.arange(6.0).reshape(2, 3)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        assert digest(tensor) == digest(local)
        assert digest(tensor) != digest(local + 1)
    finally:
        torch.distributed.destroy_process_group()


def test_a_record_counts_keys_and_world_but_not_meta():
    one, other = make_run(), make_run()
    other.meta["host"] = "elsewhere"
    assert digest(one) == digest(other)
    worlds = [Record(*world) for world in [(1,), (2,), (2, 0), (2, 1)]]
    for record in worlds:
        record.add(0, record.expected_ranks[0], "loss", "loss", torch.ones(1))
    assert len({digest(record) for record in worlds}) == 4
    assert digest(make_run(rank=1)) != digest(make_run(rank=0))


@pytest.mark.second_tier
def test_it_is_the_same_in_another_process():
    probe = "import torch, pytest_gtrainer as g; print(g.digest({'w': torch.arange(5.0)}))"
    there = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    ).stdout
    assert there.strip() == digest({"w": torch.arange(5.0)})


def test_nothing_is_copied_for_contiguous_memory(monkeypatch: pytest.MonkeyPatch):
    from pytest_gtrainer.numerics import digest as module

    seen = []
    monkeypatch.setattr(module, "memory", lambda view: seen.append(view.data_ptr()) or b"")
    tensor = torch.ones(10, dtype=torch.bfloat16)[2:]
    digest(tensor)
    assert seen == [tensor.data_ptr()]


def test_sha256_on_request():
    tensor = torch.arange(4.0)
    assert digest(tensor, algorithm="sha256").startswith("sha256:")
    assert digest(tensor, algorithm="sha256") != digest(tensor + 1, algorithm="sha256")


def test_an_unknown_algorithm_names_the_choices():
    with pytest.raises(ValueError, match="unknown digest algorithm 'md5': one of xxh3_128, sha256"):
        digest(torch.ones(1), algorithm="md5")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3.5, TypeError, "expected tensors, got float"),
        (None, TypeError, "expected tensors, got NoneType"),
        ({"lr": 0.1}, TypeError, "expected tensors, got float at 'lr'"),
        ({"state": [torch.ones(1), "x"]}, TypeError, r"expected tensors, got str at 'state\[1\]'"),
        (torch.ones(1, device="meta"), NoBytes, "a meta tensor holds no values"),
        ({"w": torch.ones(1), "module.w": torch.ones(1)}, ValueError, "two tensors are named 'w'"),
    ],
)
def test_bad_input(value, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        digest(value)


@pytest.mark.parametrize("nothing", [{}, [], [None], torch.nn.Identity(), Record(2)], ids=repr)
def test_nothing_has_no_digest(nothing):
    """L3: that of every module without parameters would be the same."""
    with pytest.raises(ValueError, match="a digest of no tensors is the same"):
        digest(nothing)
    assert digest(torch.ones(0)) != digest(torch.ones(0, 1))
