"""Graphs of other tracers and eager functions on all ranks of a simulated world, by public
names.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    NetModel,
    VacuousCheck,
    assert_bitwise_different,
    assert_bitwise_equal,
    graphtext,
    simulate_eager,
    simulate_graph,
)
from pytest_gtrainer.worlds.simulated import NoModel

SIZE = 8
NET = NetModel(nodes=2, ranks_per_node=4, channels=2)
simulated = pytest.mark.gt_world("simulated", size=SIZE, nodes=2)
fake = pytest.mark.gt_world("fake", size=SIZE)


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(rank):
    """A shard of two weights ``[8, 24]`` and ``[24, 40]``, and a batch ``[5, 8]``."""
    return (
        numbers(1, 24, seed=rank),
        numbers(3, 40, seed=SIZE + rank),
        numbers(5, 8, seed=2 * SIZE + rank),
    )


def step(first, second, x):
    """A training step by hand, sharded; gradients packed in the order of the parameters."""
    return _step(first, second, x, packed=(0, 1))


def packed_in_execution_order(first, second, x):
    return _step(first, second, x, packed=(1, 0))


def _step(first, second, x, packed):
    world = dist.group.WORLD
    whole = [
        funcol.wait_tensor(funcol.all_gather_single(shard, 0, world)) for shard in (first, second)
    ]
    hidden = torch.sin(x @ whole[0])
    loss = funcol.wait_tensor(funcol.all_reduce((hidden @ whole[1]).square().mean(), "avg", world))
    gradients = [x.t() @ hidden, hidden.t() @ (hidden @ whole[1])]
    rows = [gradients[place].bfloat16().reshape(SIZE, -1) for place in packed]
    payload = torch.cat(rows, 1).reshape(-1)
    reduced = funcol.wait_tensor(funcol.reduce_scatter_single(payload, "avg", 0, world))
    parts = dict(zip(packed, reduced.split([row.shape[1] for row in rows]), strict=True))
    return loss, parts[0].view(first.shape), parts[1].view(second.shape)


NAMES = ("loss", "first.weight", "second.weight")


def traced(function):
    return make_fx(function, tracing_mode="fake")(*inputs_of(0))


def compiled(function):
    """The graphs of Dynamo and AOTAutograd."""
    found = {}

    def keep(gm, inputs):
        found["aot"] = gm
        return gm

    def backend(gm, inputs):
        found["dynamo"] = gm
        return aot_autograd(fw_compiler=keep)(gm, inputs)

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs_of(0))
    return found


@simulated
def test_the_order_in_which_a_graph_packs_gradients_shows(gt_world):
    """This found the order of an expert's payload: two graphs, each right by itself, one not
    eager's.
    """
    expected = simulate_eager(step, inputs_of, gt_world, outputs=NAMES)
    ours, theirs = (
        simulate_graph(traced(f), inputs_of, gt_world, outputs=NAMES)
        for f in (step, packed_in_execution_order)
    )
    assert_bitwise_equal(ours, expected)
    verdict = assert_bitwise_different(theirs, expected)
    assert verdict.differences[0].key.name == "[0].first.weight"
    assert not [one for one in verdict.differences if one.key.name.endswith("loss")]


@simulated
def test_a_compiled_functions_graph_is_that_of_its_code(gt_world):
    """Its collectives are those that Dynamo traced; the net shows order, so the twin differs."""
    expected = simulate_eager(step, inputs_of, gt_world)
    graphs = compiled(step)
    assert_bitwise_equal(simulate_graph(graphs["aot"], inputs_of, gt_world), expected)
    twin = simulate_graph(compiled(packed_in_execution_order)["aot"], inputs_of, gt_world)
    assert_bitwise_different(twin, expected)
    with pytest.raises(
        NoModel, match="calls the method 'square': trace to operators, with make_fx"
    ):
        simulate_graph(graphs["dynamo"], inputs_of, gt_world)


def bucketed_by_torch(gm):
    """Both all-gathers as one, packed by ``_pre_bucket_all_gather``."""
    from torch._inductor.fx_passes import bucketing
    from torch._inductor.pattern_matcher import stable_topological_sort

    launches = gm.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
    )
    bucketing.merge_all_gather(gm, [launches], "custom_ops")
    stable_topological_sort(gm.graph)
    gm.recompile()
    assert any("_pre_bucket_all_gather" in str(node.target) for node in gm.graph.nodes)
    return gm


@pytest.mark.second_tier
@simulated
def test_torchs_buckets_gather_what_eager_gathers(gt_world):
    expected = simulate_eager(step, inputs_of, gt_world)
    gm = bucketed_by_torch(compiled(step)["aot"])
    assert_bitwise_equal(simulate_graph(gm, inputs_of, gt_world), expected)
    swapped = [inputs_of(rank ^ 1)[:1] + inputs_of(rank)[1:] for rank in range(SIZE)]
    assert_bitwise_different(simulate_graph(gm, swapped, gt_world), expected)


@fake
def test_a_net_and_a_number_of_ranks_are_worlds_too(gt_world):
    gm = traced(step)
    by_net = simulate_graph(gm, inputs_of, NET)
    assert_bitwise_equal(by_net, simulate_eager(step, inputs_of, NET))
    assert_bitwise_different(
        by_net, simulate_graph(gm, inputs_of, SIZE)
    )  # one node adds in another order


@simulated
def test_the_example_of_the_page(gt_world):
    page = Path("docs/worlds.md").read_text()
    text = re.search(r"```python\n(# test_foreign\.py\n.*?)```", page, re.DOTALL)[1]
    example = {}
    exec(compile(text, "test_foreign.py", "exec", dont_inherit=True), example)
    example["test_payload"](gt_world)


def of_a_group(name):
    text = f"""
{name} = group(range(0, 2))
if I:
  I.x: f32[3]
if fwd:
  with _:
    all_reduce: f32[3] = _c10d_functional.all_reduce(I.x, "sum", {name})
    wait_tensor: f32[3] = _c10d_functional.wait_tensor(all_reduce)
if out:
  total = wait_tensor
"""
    return graphtext.parse(text)


def test_groups_that_no_process_has_are_told_by_their_ranks():
    inputs = [{"x": torch.full((3,), float(rank))} for rank in range(4)]
    found = simulate_graph(of_a_group("tp"), inputs, 4, groups={"tp": [[0, 1], [2, 3]]})
    assert [own["total"][0].item() for own in found] == [1, 1, 5, 5]
    across = simulate_graph(
        of_a_group("tp"), inputs, 4, groups={"tp": [[0, 2], [1, 3]]}, outputs=["sum"]
    )
    assert [own["sum"][0].item() for own in across] == [2, 4, 2, 4]
    with pytest.raises(
        ValueError,
        match=r"process group 'tp', which this simulated world lacks; it has '0': where groups= is",
    ):
        simulate_graph(of_a_group("tp"), inputs, 4)
    for wrong in ([[0, 1]], [[0, 1], [1, 2, 3]]):
        message = f"groups['tp'] is {wrong}: every rank of 0..3 belongs to one group"
        with pytest.raises(ValueError, match=re.escape(message)):
            simulate_graph(of_a_group("tp"), inputs, 4, groups={"tp": wrong})


@pytest.mark.gt_world("simulated", mesh={"dp": 2, "tp": 2})
def test_groups_of_the_worlds_mesh_are_known(gt_world, gt_mesh):
    name = gt_mesh["tp"].get_group().group_name

    def function(x):
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", name))

    gm = make_fx(function, tracing_mode="fake")(torch.zeros(2))
    found = simulate_graph(gm, lambda rank: (torch.full((2,), 10.0**rank),), gt_world)
    assert [own["output_0"][0].item() for own in found] == [11, 11, 1100, 1100]


def adds(x):
    dist.all_reduce(x)
    return {"sum": x, "parts": {"first": x[0], "number": 3}, "nothing": None}


def test_results_of_a_function_have_names():
    (own, *_) = simulate_eager(adds, lambda rank: {"x": torch.full((2,), float(rank))}, 3)
    assert list(own) == ["sum", "parts.first", "parts.number", "nothing"]
    assert (own["sum"].tolist(), own["parts.number"].item(), own["nothing"]) == ([3, 3], 3, None)


@pytest.mark.parametrize("destroyed", ["the subgroup", "all groups"])
def test_a_collective_of_a_group_that_the_function_destroys_counts(destroyed):
    def adds_in_a_subgroup(x):
        group = dist.new_group([0, 1])
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group if destroyed == "the subgroup" else None)
        return x

    found = simulate_eager(adds_in_a_subgroup, lambda rank: (torch.ones(3),), 2)
    assert [own["output_0"].tolist() for own in found] == [[2, 2, 2]] * 2


def unwaited(gm):
    """Return the graph without its wait."""
    (wait,) = gm.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.wait_tensor.default
    )
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)
    return gm


def adds_in_a_group_of_two():
    group, x = dist.new_group([0, 1]), torch.ones(3)
    if dist.get_rank() in (0, 1):
        dist.all_reduce(x, group=group)
    return x


def test_a_rank_may_have_nobody_to_exchange_tensors_with():
    """As long as others do."""
    found = simulate_eager(adds_in_a_group_of_two, lambda rank: (), 3)
    assert [next(iter(of_rank.values()))[0].item() for of_rank in found] == [2, 2, 1]


ALL = {"tp": [range(4)]}
X = (torch.ones(3),)
REFUSED = {
    "one rank": (lambda gm: simulate_graph(gm, inputs_of, 1), VacuousCheck, "world of one rank"),
    "one thread": (
        lambda gm: simulate_eager(adds, inputs_of, 1),
        VacuousCheck,
        "world of one rank",
    ),
    "eager alone": (
        lambda gm: simulate_eager(lambda x: x, lambda r: X, 2),
        VacuousCheck,
        "no rank came to a coll",
    ),
    "graph alone": (
        lambda gm: simulate_graph(make_fx(torch.sin)(*X), lambda r: X, 2),
        VacuousCheck,
        "has no coll",
    ),
    "a read before the wait": (
        lambda gm: simulate_graph(unwaited(gm), inputs_of, 4, groups=ALL),
        ValueError,
        "reads all_reduce.* before it is waited for",
    ),
    "a name twice": (
        lambda gm: simulate_eager(
            lambda *given: (given[0], given[1]), inputs_of, 4, outputs=["a", "a"]
        ),
        ValueError,
        "^a names more than one result",
    ),
    "a key twice": (
        lambda gm: simulate_eager(
            lambda *given: {"a": {"b": given[0]}, "a.b": given[1]}, inputs_of, 4
        ),
        ValueError,
        "^a.b names more than one result",
    ),
    "a group": (
        lambda gm: simulate_graph(gm, inputs_of, 4, groups={**ALL, "tpp": [range(4)]}),
        ValueError,
        "no collective of the graph is in 'tpp' of groups=; its groups are 'tp'",
    ),
    "too few": (
        lambda gm: simulate_graph(gm, [X, X], 4, groups=ALL),
        ValueError,
        "for 2 ranks, the world has 4",
    ),
    "a tensor": (
        lambda gm: simulate_graph(gm, lambda r: X[0], 4, groups=ALL),
        ValueError,
        "rank 0 are a Tensor: give",
    ),
    "names": (
        lambda gm: simulate_graph(gm, lambda r: {"y": 0}, 4, groups=ALL),
        ValueError,
        "x, differ in x, y",
    ),
    "a world": (
        lambda gm: simulate_graph(gm, inputs_of, "8"),
        ValueError,
        "a number of ranks; not '8'",
    ),
    "outputs": (
        lambda gm: simulate_graph(gm, lambda r: X, 4, groups=ALL, outputs="ab"),
        ValueError,
        "2 names of out",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_simulated_is_one_sentence(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call(of_a_group("tp"))
    assert "\n" not in str(raised.value)


def gives_to_the_next(x):
    """Ranks send around a ring; even ones begin."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
    else:
        dist.recv(received, (rank - 1) % size)
        dist.send(x, (rank + 1) % size)
    return received


def test_messages_alone_are_communication():
    found = simulate_eager(gives_to_the_next, lambda rank: (torch.full((2,), float(rank)),), 4)
    assert [result["output_0"][0].item() for result in found] == [3, 0, 1, 2]
