"""The pass that changes a bit is named, with the node where it begins."""

import pytest
import torch
from torch import nn

from fixtures.training import llama3_training
from pytest_gtrainer import bind_options, bisect_passes, trace_step
from pytest_gtrainer.bisect import flat_inputs
from pytest_gtrainer.graph.nodes import node_fqn
from pytest_gtrainer.passes.canonicalize import canonicalize_graph_pass, eliminate_dead_code_pass
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import shard_traceably, trace_config

ADD = torch.ops.aten.add.Tensor


class Net(nn.Module):
    """``(a + b) + c`` in a module of its own, random numbers, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.sum, self.drop = Sum(), nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, a, b, c):
        self.steps += 1
        return self.drop(self.sum(a * self.scale, b, c))


class Sum(nn.Module):
    def forward(self, a, b, c):
        return (a + b) + c


def step(model, a, b, c):
    return model(a, b, c).square().sum()


BATCH = (
    torch.full((32,), 1e8),
    torch.full((32,), -1e8),
    torch.ones(32),
)  # 1 + 0 on the left, 0 on the right


def reassociate_pass(gm, example_inputs, *, places: int = 1):
    """The planted fault: ``(a + b) + c`` becomes ``a + (b + c)``."""
    for node in list(gm.graph.nodes):
        inner = node.args[0] if node.args else None
        if (
            node.target is ADD
            and isinstance(inner, torch.fx.Node)
            and inner.target is ADD
            and places
        ):
            places -= 1
            with gm.graph.inserting_before(node):
                right = gm.graph.call_function(ADD, (inner.args[1], node.args[1]))
                whole = gm.graph.call_function(ADD, (inner.args[0], right))
            for made in (right, whole):
                made.meta = dict(node.meta)
            node.replace_all_uses_with(whole)
            gm.graph.erase_node(node)
    return gm


def copy_pass(gm, example_inputs, *, label: str = ""):
    """Puts a clone behind every product: other nodes, the same bits."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        with gm.graph.inserting_after(node):
            clone = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
        clone.meta = dict(node.meta)
        node.replace_all_uses_with(
            clone, delete_user_cb=lambda user, clone=clone: user is not clone
        )
    return gm


HARMLESS = [
    bind_options(eliminate_dead_code_pass),
    bind_options(canonicalize_graph_pass, rules=["detach", "view"]),
]
HARMLESS += [bind_options(copy_pass, label=label) for label in "abc"]


def pipeline(at: int):
    """Five passes that change nothing, the fault before the ``at``-th of them."""
    return [*HARMLESS[:at], bind_options(reassociate_pass), *HARMLESS[at:]]


def traced_net():
    torch.manual_seed(0)
    return trace_step(Net(), step, BATCH)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("at", range(6))
def test_the_pass_that_changes_a_bit_is_named(at: int, every: bool):
    found = bisect_passes(traced_net(), pipeline(at), (Net(), *BATCH), every=every)
    assert (found.outcome, found.number, found.total) == ("different", at + 1, 6)
    assert found.name.startswith("reassociate_pass(")
    assert found.replays <= (3 + at + 1 if every else 3 + 4)


def test_the_text_names_the_first_node_and_what_it_is_computed_from():
    text = str(bisect_passes(traced_net(), pipeline(3), (Net(), *BATCH)))
    lines = text.splitlines()
    assert lines[0] == "introduced by pass 4 of 6, reassociate_pass() (6 replays)"
    assert lines[1].startswith("  first node whose value differs: ")
    assert lines[-3:] == [
        "  computed from what the pass made",
        "    add_tensor = aten.add.Tensor in the forward of sum",
        "    add_tensor_1 = aten.add.Tensor in the forward of sum",
    ]
    assert "ULP apart" in text


def test_a_node_whose_operator_a_pass_exchanged_is_named_itself():
    exchanged = []

    def subtract_pass(gm, example_inputs):
        node = next(
            node for node in gm.graph.nodes if node.target is ADD and node_fqn(node) == "sum"
        )
        node.target = torch.ops.aten.sub.Tensor
        exchanged.append(node.name)
        return gm

    found = bisect_passes(
        traced_net(), [*HARMLESS[:2], bind_options(subtract_pass)], (Net(), *BATCH)
    )
    assert found.where == f"{exchanged[0]} = aten.sub.Tensor in the forward of sum"


class Products(nn.Module):
    """Many of them in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x):
        for _ in range(9):
            x = x * self.scale
        return x


def remade_pass(gm, example_inputs):
    """Make each node anew and each product another sum: the graphs have no node in common."""
    for node in [node for node in gm.graph.nodes if node.op == "call_function"]:
        with gm.graph.inserting_before(node):
            other = ADD if node.target is torch.ops.aten.mul.Tensor else node.target
            made = gm.graph.call_function(other, node.args, node.kwargs)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
    return gm


def test_where_no_node_is_left_the_result_is_named_and_the_text_fits_a_terminal():
    traced = trace_step(Products(), lambda model, x: model(x).sum(), (torch.full((32,), 3.0),))
    found = bisect_passes(traced, [bind_options(remade_pass)], (Products(), torch.full((32,), 3.0)))
    lines = str(found).splitlines()
    assert lines[0] == "introduced by pass 1 of 1, remade_pass() (4 replays)"
    assert lines[1].startswith("  first node whose value differs: the result loss = ")
    assert lines[5] == "  computed from what the pass made"
    assert lines[-1] == f"    and {len(found.made) - 8} more"
    assert (len(lines), len(found.made)) == (15, 11)
    assert max(map(len, lines)) < 120


def test_passes_that_change_no_bit_are_equal():
    """The twin; random numbers and the buffer start anew at every replay."""
    model = Net()
    found = bisect_passes(traced_net(), HARMLESS, (model, *BATCH))
    assert (found.outcome, str(found)) == (
        "equal",
        "all 5 passes together change no bit (42 replays)",
    )
    assert model.steps == 0


def test_a_list_without_a_pass_is_refused():
    """As a filter of passes leaves: nothing would be compared."""
    with pytest.raises(ValueError, match="bisect_passes was given no pass, so nothing would be"):
        bisect_passes(traced_net(), [], (Net(), *BATCH))


def test_a_difference_that_is_taken_back_is_found_by_replaying_every_prefix():
    def undo_pass(gm, example_inputs):
        return traced_net().gm

    passes = [*pipeline(1), bind_options(undo_pass)]
    halved = bisect_passes(traced_net(), passes, (Net(), *BATCH))
    assert halved.outcome == "equal"
    assert str(halved).startswith(f"all {len(passes)} passes together change no bit (")
    assert bisect_passes(traced_net(), passes, (Net(), *BATCH), every=True).number == 2
    harmless = bisect_passes(traced_net(), HARMLESS[:2], (Net(), *BATCH), every=True)
    assert str(harmless).startswith("no pass of 2 changes a bit (")


def test_a_wrong_result_of_a_buffer_counts():
    def count_twice_pass(gm, example_inputs):
        node = next(
            node for node in gm.graph.nodes if node.target in (torch.ops.aten.add_.Tensor, ADD)
        )
        node.args = (node.args[0], 2)
        return gm

    found = bisect_passes(
        traced_net(), [*HARMLESS[:2], bind_options(count_twice_pass)], (Net(), *BATCH)
    )
    assert (found.number, [one.key.name for one in found.verdict.differences]) == (
        3,
        ["steps afterwards"],
    )


def before_the_output(gm, target, *args):
    """Call an operator behind all others."""
    with gm.graph.inserting_before(gm.graph.output_node()):
        made = gm.graph.call_function(target, args)
    made.meta = {
        "val": args[0].meta["val"] if isinstance(args[0], torch.fx.Node) else torch.zeros(2)
    }
    return gm


def doubles_a_weight_pass(gm, example_inputs):
    return before_the_output(
        gm, torch.ops.aten.mul_.Scalar, gm.graph.find_nodes(op="placeholder")[0], 2
    )


def doubles_the_batch_pass(gm, example_inputs):
    return before_the_output(
        gm, torch.ops.aten.mul_.Scalar, gm.graph.find_nodes(op="placeholder")[-1], 2
    )


def draws_pass(gm, example_inputs):
    return before_the_output(gm, torch.ops.aten.rand.default, [2])


BESIDE_RESULTS = [
    (doubles_a_weight_pass, "scale afterwards, element (0)", "mul__scalar = aten.mul_.Scalar"),
    (doubles_the_batch_pass, "input 2 afterwards, element (0)", "mul__scalar = aten.mul_.Scalar"),
    (
        draws_pass,
        "random state of torch.cpu afterwards, element (",
        "rand_default = aten.rand.default",
    ),
]


@pytest.mark.parametrize(("wrong_pass", "what", "made"), BESIDE_RESULTS)
def test_a_pass_that_changes_no_result_but_what_the_graph_leaves_is_named(wrong_pass, what, made):
    """V2"""
    found = bisect_passes(
        traced_net(), [*HARMLESS[:2], bind_options(wrong_pass), *HARMLESS[2:]], (Net(), *BATCH)
    )
    assert (found.outcome, found.number, found.inputs) == ("different", 3, "")
    lines = str(found).splitlines()
    assert lines[1].startswith(f"  every result is equal, but not {what}")
    assert lines[-2:] == ["  the pass made", f"    {made} in the forward"]


@pytest.mark.parametrize(("wrong_pass", "what"), [(each[0], each[1]) for each in BESIDE_RESULTS])
@pytest.mark.gt_world("simulated", size=2, nodes=1)
def test_also_in_a_simulated_world_on_each_rank(wrong_pass, what, gt_world):
    """V2"""
    flat = flat_inputs((Net(), *BATCH))
    found = bisect_passes(
        traced_net(), [*HARMLESS, bind_options(wrong_pass)], [flat, flat], world=gt_world
    )
    assert (found.outcome, found.number) == ("different", 6)
    names = {(one.key.rank, one.key.name) for one in found.verdict.differences}
    assert names == {(rank, what.partition(", element")[0]) for rank in range(2)}


@pytest.mark.gt_world("ranks", size=2)
def test_all_ranks_name_a_pass_that_draws_on_one_of_them(gt_world):
    """V2: nobody waits for the other in a replay of all values."""
    wrong = [bind_options(draws_pass)] if gt_world.rank else [bind_options(copy_pass, label="last")]
    found = bisect_passes(traced_net(), [*HARMLESS, *wrong], (Net(), *BATCH))
    assert (found.outcome, found.number) == ("different", 6)
    assert ("random state of torch.cpu" in str(found)) == (gt_world.rank == 1)


def clamps_pass(gm, example_inputs):
    """Bounds what a module drops, whose numbers are small."""
    node = next(node for node in gm.graph.nodes if node.target is ADD and node_fqn(node) == "sum")
    with gm.graph.inserting_after(node):
        bounded = gm.graph.call_function(torch.ops.aten.clamp.default, (node, -100, 100))
    bounded.meta = dict(node.meta)
    node.replace_all_uses_with(bounded, delete_user_cb=lambda user: user is not bounded)
    return gm


def test_a_pass_that_bounds_large_numbers_is_named_with_its_inputs():
    """V2: on the inputs as they were given no bit differs."""
    small = tuple(torch.full((32,), value) for value in (1.0, 2.0, 3.0))
    passes = [*HARMLESS[:2], bind_options(clamps_pass), *HARMLESS[2:]]
    found = bisect_passes(traced_net(), passes, (Net(), *small))
    assert (found.outcome, found.number) == ("different", 3)
    assert found.inputs == "inputs with large numbers in some inputs"
    assert str(found).startswith("introduced by pass 3 of 6, clamps_pass() (")
    assert "clamp_default = aten.clamp.default in the forward of sum" in str(found)
    assert bisect_passes(traced_net(), HARMLESS, (Net(), *small)).silent == ()


class TwoWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale + self.shift


@pytest.mark.parametrize(
    ("step", "silent", "nan"),
    [
        (lambda model, x: model(x).sum(), (), ("loss", "scale")),
        (lambda model, x: model(x).square().sum(), ("the inputs as they were given",), ()),
    ],
    ids=["some results", "all results"],
)
def test_results_of_the_given_inputs_that_show_nothing_are_said(step, silent, nan):
    """V2: what is equal on other inputs afterwards does not hide that these proved nothing."""
    model, x = TwoWeights(), torch.full((4,), torch.nan)
    found = bisect_passes(trace_step(model, step, (x,)), [bind_options(copy_pass)], (model, x))
    assert found.outcome == "equal"
    assert found.silent[: len(silent)] == silent
    assert tuple(name.split()[-1] for name in found.nan) == nan
    for words in (*silent, *found.nan):
        assert words in str(found)


@pytest.mark.gt_world("simulated", size=2, nodes=1)
def test_extreme_inputs_of_a_simulated_world_are_those_of_all_ranks(gt_world):
    """V2"""
    flat = flat_inputs((Net(), *(torch.full((32,), value) for value in (1.0, 2.0, 3.0))))
    found = bisect_passes(
        traced_net(), [*HARMLESS, bind_options(clamps_pass)], [flat, flat], world=gt_world
    )
    assert (found.number, found.inputs) == (6, "inputs with large numbers in some inputs")


@pytest.mark.gt_world("fake", size=2)
def test_a_fake_world_is_refused(gt_world):
    """W1"""
    with pytest.raises(
        ValueError, match="a fake world moves no data, so no replay in it means anything"
    ):
        bisect_passes(traced_net(), HARMLESS, (Net(), *BATCH))


def rewriting(config):
    traced = trace_config(config, shard_traceably(new_model(config), config))
    return traced, [
        *HARMLESS,
        bind_options(reassociate_pass, places=100),
        bind_options(copy_pass, label="last"),
    ]


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2)
def test_on_ranks_with_collectives(gt_mesh, gt_world):
    config = llama3_training(gt_mesh, "fp32")
    traced, passes = rewriting(config)
    model = shard_traceably(new_model(config), config)
    found = bisect_passes(traced, passes, (model, *config.batch(0, gt_world.rank)))
    assert (found.outcome, found.number) == ("different", 6)


@pytest.mark.gt_world("ranks", size=2)
def test_all_ranks_name_the_same_pass(gt_world):
    """On rank 0 all sums are of zeros, which no order changes; the pass is named nevertheless."""
    found = bisect_passes(
        traced_net(), pipeline(3), (Net(), *(each * gt_world.rank for each in BATCH))
    )
    assert (found.outcome, found.number) == ("different", 4)
    assert (found.node is None) == (gt_world.rank == 0)
    assert ("no value that both graphs have differs on this rank" in str(found)) == (
        gt_world.rank == 0
    )


@pytest.mark.second_tier
@pytest.mark.gt_world("simulated", size=2, nodes=1)
def test_in_a_simulated_world(gt_mesh, gt_world):
    config = llama3_training(gt_mesh, "fp32")
    traced, passes = rewriting(config)
    flat = flat_inputs((shard_traceably(new_model(config), config), *config.batch(0, 0)))
    found = bisect_passes(traced, passes, [flat, flat], world=gt_world, meshes=[gt_mesh])
    assert (found.outcome, found.number) == ("different", 6)
    assert "  computed from what the pass made\n    add_tensor" in str(found)
    assert (
        bisect_passes(traced, HARMLESS, [flat, flat], world=gt_world, meshes=[gt_mesh]).outcome
        == "equal"
    )


def test_a_graph_in_the_place_of_a_step_is_refused():
    traced = trace_step(Net(), step, BATCH)
    with pytest.raises(TypeError, match="takes what trace_step returns, and was given a Graph"):
        bisect_passes(traced.gm, [canonicalize_graph_pass], BATCH)
