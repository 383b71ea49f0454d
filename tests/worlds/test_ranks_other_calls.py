"""Calls in which ranks differ, and which gloo ends without a word, with numbers that mean nothing.

In the first tier the ranks of one run meet all of them; each has a twin in which ranks agree.
"""

from tests.worlds.conftest import Suite

SUITE = """
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

pytestmark = pytest.mark.gt_world("ranks", size=3)
KINDS = {
    "integers": (torch.float32, torch.int32),
    "halves": (torch.bfloat16, torch.float16),
}


def all_reduce(x): dist.all_reduce(x)
def all_gather(x): dist.all_gather_into_tensor(x.new_empty(3 * len(x)), x)
def broadcast(x): dist.broadcast(x, 0)
def functional(x): funcol.all_reduce(x, "sum", dist.group.WORLD).sum()
def all_to_all(x): dist.all_to_all_single(torch.empty_like(x), x)
def in_a_group(x):
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(x, group=group)


CALLS = [all_reduce, all_gather, broadcast, functional, all_to_all, in_a_group]


# Which dtypes differ is the same to all of them: one meets both kinds.
@pytest.mark.parametrize(
    ("call", "kinds"), [*((call, "integers") for call in CALLS), (all_reduce, "halves")]
)
def test_differs(call, kinds):
    dist.barrier()
    call(torch.ones(3, dtype=KINDS[kinds][dist.get_rank() == 2]))


@pytest.mark.parametrize("call", CALLS)
def test_agrees(call):
    for dtype in (torch.float32, torch.int32):
        call(torch.ones(3, dtype=dtype))


def test_differs_in_order():
    parts = [all_reduce, broadcast]
    if dist.get_rank() == 1:
        parts.reverse()
    for part in parts:
        part(torch.ones(4))


def test_agrees_on_the_dtype_of_uneven_parts():
    # Rank r sends r + 1 elements to each rank.
    own = dist.get_rank() + 1
    dist.all_to_all_single(torch.empty(6), torch.ones(3 * own), [1, 2, 3], [own] * 3)


def test_agrees_after_many():
    for _ in range(300):
        dist.all_reduce(torch.ones(1))


def reduce_scatter(x): dist.reduce_scatter_tensor(x.new_empty(len(x) // 3), x)


# The same collectives, issued by C++.
WAYS = {
    all_reduce: functional,
    all_gather: lambda x: funcol.all_gather_tensor(x, 0, dist.group.WORLD).sum(),
    broadcast: lambda x: funcol.broadcast(x, 0, dist.group.WORLD).sum(),
    reduce_scatter: lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD).sum(),
}


@pytest.mark.parametrize("call", WAYS)
def test_agrees_by_two_ways(call):
    for dtype in (torch.float32, torch.uint8, torch.bfloat16):
        (WAYS[call] if dist.get_rank() == 2 else call)(torch.ones(3, dtype=dtype))
    for last in (dist.barrier, lambda: dist.reduce(torch.ones(3), 1)):
        last()


@pytest.mark.parametrize("call", [all_reduce, broadcast])
def test_differs_by_two_ways(call):
    dist.barrier()
    dtype = KINDS["integers"][dist.get_rank() == 2]
    (WAYS[call] if dist.get_rank() == 2 else call)(torch.ones(3, dtype=dtype))


def test_differs_before_others():
    all_reduce(torch.ones(3, dtype=KINDS["integers"][dist.get_rank() == 2]))
    for _ in range(40):
        dist.all_reduce(torch.ones(1))


def test_differs_late():
    for _ in range(102):
        dist.all_reduce(torch.ones(1))
    all_reduce(torch.ones(3, dtype=KINDS["integers"][dist.get_rank() == 2]))


def test_differs_in_number():
    # The recorder of rank 1 loses its call on the first pair, which rank 0 keeps.
    pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(1), group=pairs[0])
    if dist.get_rank() != 0:
        for _ in range(100):
            dist.all_reduce(torch.ones(1), group=pairs[1])
    if dist.get_rank() == 2:
        dist.all_reduce(torch.ones(5), group=pairs[2], async_op=True)


def test_agrees_after_a_monitored_barrier():
    dist.monitored_barrier()
    for call in (all_reduce, all_reduce, broadcast, all_gather):
        call(torch.ones(3))


def test_differs_after_a_monitored_barrier():
    all_reduce(torch.ones(3))
    dist.monitored_barrier()
    all_reduce(torch.ones(3, dtype=KINDS["integers"][dist.get_rank() == 2]))


def send_or_recv(x):
    if dist.get_rank() == 0:
        dist.send(x, 1)
    elif dist.get_rank() == 1:
        dist.recv(x, 0)


def recv_from_any(x):
    if dist.get_rank() == 0:
        dist.send(x, 1)
    elif dist.get_rank() == 1:
        dist.recv(x)


@pytest.mark.parametrize("call", [send_or_recv, recv_from_any])
def test_dynamo_compiles_nothing_that_counts_messages(call):
    from torch._dynamo.convert_frame import register_bytecode_hook

    def calls(x):
        call(x)
        return x + 1

    compiled = []
    handle = register_bytecode_hook(lambda code, _: compiled.append(code))
    try:
        torch.compile(calls, backend="eager")(torch.ones(3))
    finally:
        handle.remove()
    assert "calls" in {code.co_name for code in compiled}
    assert not [code for code in compiled if "pytest_gtrainer" in code.co_filename]
"""


def test_calls_that_differ_fail_a_test_that_would_pass(tmp_path):
    suite = Suite(tmp_path / "suite")
    suite.write("test_it.py", SUITE)
    run = suite.run("--gt-gpus=3")
    texts = {name: run.text(name) for name in run.reports if run.outcome(name) == "failed"}
    differing = {name for name in run.reports if "differs" in name}
    assert len(differing) == 14
    assert set(texts) == differing
    for name, text in texts.items():
        if "integers" in name or "halves" in name:
            group = "ranks 0, 2" if "in_a_group" in name else "all ranks"
            assert f"the ranks called different collectives on {group}: rank" in text
            assert "rank 2 called " in text
            assert " at test_it.py:" in text
            number = 1 if "in_a_group" in name else 2
            assert f"as call {number} of this test" in text
    late = texts["test_differs_late"]
    assert "rank 2 called all_reduce of int32[3] at " in late
    assert "as call 103 of this test on all ranks" in late
    assert "; rank 2 alone called all_reduce of float32[5] at " in texts["test_differs_in_number"]
    after_barrier = texts["test_differs_after_a_monitored_barrier"]
    assert "rank 2 called all_reduce of int32[3] at " in after_barrier
    assert "as call 3 of this test on all ranks" in after_barrier
