"""Generated graphs are right, of all kinds; ``fuzz`` finds mistakes of passes and blames no right
one.
"""

import copy
import re
import signal
import sys
import time
from contextlib import suppress

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

from pytest_gtrainer import (
    PlanError,
    deduplicate_fsdp_unshard_chains_pass,
    graphtext,
    joint_transformer_block_bucketing_reordering_pass,
    prove,
)
from pytest_gtrainer.__main__ import main
from pytest_gtrainer._torch.process_groups import group_ranks
from pytest_gtrainer.attack.claims import shape_of
from pytest_gtrainer.attack.fuzz import Fuzzer
from pytest_gtrainer.attack.generate import generate
from pytest_gtrainer.attack.guarded import guarded
from pytest_gtrainer.attack.models import graphs_of
from pytest_gtrainer.attack.oracles import Failure, judge_graphs
from pytest_gtrainer.attack.reduce import Reduction
from pytest_gtrainer.graph.collectives import fsdp_all_gathers, group_of, kind_of, launches
from pytest_gtrainer.graph.nodes import mutates, short_name
from pytest_gtrainer.proofs.inputs import draw_inputs
from pytest_gtrainer.references.config import TrainConfig
from pytest_gtrainer.testing import run_pass_file

aten = torch.ops.aten


def merge(gm, key_of):
    """Merge nodes of one key."""
    seen = {}
    for node in list(gm.graph.nodes):
        key = key_of(node)
        if key is None:
            continue
        if key in seen:
            node.replace_all_uses_with(seen[key])
            gm.graph.erase_node(node)
        seen.setdefault(key, node)
    gm.recompile()
    return gm


def key_of_call(node):
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target._schema.is_mutable:
        return None
    return node.target, str(node.args), str(node.kwargs)


def merge_everything_pass(gm, inputs=None):
    """The newcomer's CSE: fresh buffers and random numbers are merged, and reads across writes."""
    return merge(gm, key_of_call)


def merge_reversed_pass(gm, inputs=None):
    """Takes a - b for b - a."""

    def key_of(node):
        if node.target not in (aten.add.Tensor, aten.sub.Tensor):
            return None
        return node.target, str(sorted(map(str, node.args)))

    return merge(gm, key_of)


def drop_casts_pass(gm, inputs=None):
    """Drops a cast to bf16 and back, which rounds."""
    for node in list(gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)):
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.target is not aten._to_copy.default:
            continue
        if source.args[0].meta["val"].dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(source.args[0])
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def divide_pass(gm, inputs=None):
    """Multiplies by 0.3 for a division by 3."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.div.Scalar):
        node.target, node.args = aten.mul.Scalar, (node.args[0], round(1 / node.args[1], 1))
    gm.recompile()
    return gm


def crash_pass(gm, inputs=None):
    """Reads the second operand of a cat, which may not be there."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.cat.default):
        node.args[0][2]
    return gm


def neg_pass(gm, inputs=None):
    """Right: -(-x) is x, where nobody writes."""
    written = any(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for node in gm.graph.nodes
    )
    for node in list(gm.graph.find_nodes(op="call_function", target=aten.mul.Scalar)):
        if node.args[1] in (1, 2) and not written:
            with gm.graph.inserting_before(node):
                twice = gm.graph.call_function(aten.mul.Scalar, (node.args[0], 2))
                half = gm.graph.call_function(aten.mul.Scalar, (twice, node.args[1] / 2))
            for each in (twice, half):
                each.meta.update(node.meta)
            node.replace_all_uses_with(half)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def nothing_pass(gm, inputs=None):
    return gm


def refusing_pass(gm, inputs=None):
    raise ValueError("this pass takes sharded graphs")


def endless_pass(gm, inputs=None):
    while True:
        time.sleep(0.01)


def mean_pass(gm, inputs=None):
    """Takes a sum over ranks for a mean."""
    for node in gm.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_reduce.default
    ):
        node.args = (node.args[0], "sum", node.args[2])
    gm.recompile()
    return gm


def fuzz(name, folder, *arguments):
    given = ["--gt-pass", f"{__name__}:{name}", "--folder", folder, *arguments]
    return main(["fuzz", *map(str, given)])


@hypothesis.given(st.integers(0, 10**6))
@hypothesis.settings(max_examples=15, deadline=None)
def test_generated_graphs_run_and_are_text(seed):
    gm = generate(seed, 40)
    gm.graph.lint()
    text = graphtext.render(gm)
    again = graphtext.parse(text)
    assert graphtext.render(again) == text
    inputs = draw_inputs(gm, seed)
    for result, node in zip(gm(*inputs), gm.graph.output_node().args[0], strict=True):
        value = node.meta["val"]
        assert (result.shape, result.dtype) == (value.shape, value.dtype)
        assert result.stride() == value.stride()


@pytest.mark.second_tier
@hypothesis.given(st.integers(0, 10**6))
@hypothesis.example(360338)  # it copied an expanded tensor to itself
@hypothesis.settings(max_examples=10, deadline=None)
def test_a_generated_graph_is_itself(seed):
    """It reads no memory that nobody has written."""
    gm = generate(seed, 40)
    assert prove(fx.GraphModule(gm, copy.deepcopy(gm.graph)), gm).kind == "identical"


def test_a_seed_makes_the_same_graph():
    texts = [graphtext.render(generate(seed, 40)) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_functional_graphs_write_nothing():
    for seed in range(8):
        gm = generate(seed, functional=True)
        written = [node for node in gm.graph.nodes if mutates(node)]
        assert not written
        assert not gm.graph.find_nodes(op="call_function", target=aten.empty_like.default)


@pytest.mark.gt_world("fake", mesh={"dp": 2, "tp": 2})
def test_functional_graphs_have_what_torch_fuses(gt_mesh):
    """Averages of gradients, products of gathered rows, products that are scattered."""
    seen = set()
    for seed in range(12):
        gm = generate(seed, 60, ranks=4, functional=True)
        for node in gm.graph.nodes:
            if node.op == "call_function":
                operands = [short_name(each) for each in node.all_input_nodes]
                seen.add((short_name(node), *operands[:1]))
    averages, gathered, scattered = ("all_reduce", "div"), ("mm", "wait_tensor"), "mm"
    assert {averages, gathered, ("reduce_scatter_tensor", scattered)} <= seen
    assert {("mm", "reshape"), ("cat", "slice"), ("cat", "split")} & seen


def wrong_in_bodies_pass(gm, inputs=None):
    """Takes -x for x in graphs inside the graph."""
    for body in list(gm.children()):
        for node in body.graph.find_nodes(op="call_function", target=aten.neg.default):
            node.target = aten.clone.default
        body.recompile()
    return gm


@pytest.mark.second_tier
def test_a_mistake_inside_of_a_body_is_found(tmp_path):
    """The graph itself is as it was, and its bodies are other objects than those of the version
    before.
    """
    fuzzer = Fuzzer(wrong_in_bodies_pass, "wrong", "reordered", 0, tmp_path, lambda _: None)
    judged = []
    fuzzer._report = lambda before, seed, nodes, failure: judged.append(failure.kind)
    for seed in range(24):
        fuzzer._try(seed, 20)
    assert set(judged) == {"not reordered"}


def test_graphs_have_every_kind_of_operator():
    seen = set()
    for seed in range(30):
        gm = generate(seed)
        seen.update(str(node.target) for node in gm.graph.nodes)
        returned = list(gm.graph.output_node().args[0])
        if len(set(returned)) < len(returned):
            seen.add("a result twice")
        for node in gm.graph.nodes:
            if not node.users and node.op == "placeholder":
                seen.add("an input that nobody reads")
            elif not node.users and node.op == "call_function":
                seen.add("a dead node")
            if node.op == "placeholder" and node in returned:
                seen.add("an input that is returned")
            if node.target is aten.constant_pad_nd.default and node.args[1] == [1, -1]:
                seen.add("a pad that shifts")
            if "alpha" in node.kwargs:
                seen.add("a factor")
            if node.op == "placeholder" and not node.meta["val"].is_contiguous():
                seen.add("an input in another order")
    wanted = {"a dead node", "an input that is returned", "a factor", "an input in another order"}
    wanted |= {"aten.addmm.default", "aten.expand.default", "cond", "invoke_subgraph"}
    wanted |= {"a pad that shifts", "aten.sym_size.int", "aten.full.default"}
    wanted |= {"a result twice", "an input that nobody reads", "aten.empty_like.default"}
    wanted |= {
        "aten.copy_.default",
        "aten.add_.Tensor",
        "aten.rand_like.default",
        "aten.mm.default",
    }
    wanted |= {"aten.embedding.default", "aten.cat.default", "aten.split.Tensor", "aten.select.int"}
    wanted |= {
        "aten._softmax.default",
        "aten._to_copy.default",
        "aten.where.self",
        "aten.bmm.default",
    }
    assert wanted <= seen


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("merge_everything_pass", "not reordered"),
        ("merge_reversed_pass", "not reordered"),
        ("drop_casts_pass", "not reordered"),
        ("divide_pass", "not reordered"),
        ("crash_pass", "IndexError: the pass raises IndexError"),
    ],
)
def test_a_mistake_is_found_and_reduced(name, says, tmp_path, capsys):
    assert fuzz(name, tmp_path, "--minutes", 2, "--failures", 1, "--nodes", 40) == 1
    [path] = tmp_path.glob("*.fxgraph")
    lines = [line for line in path.read_text().splitlines() if "aten." in line]
    assert len(lines) <= 10, path.read_text()
    said = capsys.readouterr().err
    assert says in said
    spent = r"1 failure \([\d.]+ s to try graphs, [\d.]+ s to reduce failures\)$"
    assert re.search(spent, said, re.MULTILINE)
    with pytest.raises((AssertionError, IndexError)):
        run_pass_file(path, passes={name: globals()[name]})


@pytest.mark.second_tier
def test_a_mistake_between_ranks_is_found(tmp_path):
    arguments = "--minutes", 2, "--failures", 1, "--nodes", 30, "--ranks", 2
    assert fuzz("mean_pass", tmp_path, *arguments) == 1
    [path] = tmp_path.glob("*.fxgraph")
    assert "dp = group(range(0, 2))" in path.read_text()
    assert path.read_text().count("= _c10d_functional.") == 2, "the sum and its wait"


@pytest.mark.second_tier
def test_a_right_pass_is_not_blamed(tmp_path, capsys):
    assert fuzz("neg_pass", tmp_path, "--minutes", 0.1, "--nodes", 15) == 0
    assert not list(tmp_path.iterdir())
    assert "0 failures" in capsys.readouterr().err


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", mesh={"dp": 2, "tp": 2})
def test_half_of_the_graphs_gather_parameters_as_fsdp_does(gt_mesh):
    """Passes that bucket refuse the others; those show a pass that takes relu(w) for w."""
    plain, buckets = 0, 0
    for seed in range(20):
        gm = generate(seed, 40, ranks=4)
        members = fsdp_all_gathers(gm)
        chains = [node.target for member in members for node in member.chain]
        if set(chains) <= {aten._to_copy.default}:
            plain += 1
            gm = deduplicate_fsdp_unshard_chains_pass(gm)
            plan = [*sorted({member.bucket_fqn for member in members}), ""]
            with suppress(PlanError):  # a gather behind a write is another one
                gm = joint_transformer_block_bucketing_reordering_pass(gm, bucket_plan=plan)
                buckets += any("fsdp_bucket" in node.meta for node in gm.graph.nodes)
    assert 5 <= plain <= 18
    assert buckets >= 5


def mean_of_pairs_pass(gm, inputs=None):
    """Takes a sum for a mean in the inner of two groups alone, those of neighbours."""
    target = torch.ops._c10d_functional.all_reduce.default
    for node in gm.graph.find_nodes(op="call_function", target=target):
        if group_ranks(node.args[2]) == (0, 1):
            node.args = (node.args[0], "sum", node.args[2])
    gm.recompile()
    return gm


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", mesh={"dp": 2, "tp": 2})
def test_collectives_are_of_several_groups_and_kinds(gt_mesh):
    seen = set()
    for seed in range(60):
        gm = generate(seed, 60, ranks=4)
        assert graphtext.render(graphtext.parse(graphtext.render(gm))) == graphtext.render(gm)
        for node in gm.graph.nodes:
            if launches(node.target):
                seen.add((kind_of(node), group_ranks(group_of(node))))
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert seen == {(kind, group) for kind in kinds for group in ((0, 2), (0, 1), (0, 1, 2, 3))}


@pytest.mark.second_tier
def test_a_mistake_in_one_of_two_groups_is_found(tmp_path):
    arguments = "--minutes", 2, "--failures", 1, "--nodes", 30, "--ranks", 4
    assert fuzz("mean_of_pairs_pass", tmp_path, *arguments) == 1
    [path] = tmp_path.glob("*.fxgraph")
    text = path.read_text()
    assert "tp = group(range(0, 2))" in text
    assert text.count("= _c10d_functional.") == 2, "the sum and its wait"


def once_pass(gm, inputs=None):
    """Wrong the first time that it meets a graph: it remembers how many nodes that had."""
    count = len(gm.graph.nodes)
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if count not in once_pass.seen:
            node.target = aten.sub.Tensor
    once_pass.seen.add(count)
    gm.recompile()
    return gm


def test_a_failure_that_does_not_repeat_is_written(tmp_path, capsys):
    once_pass.seen = set()
    arguments = "--minutes", 0.5, "--failures", 1, "--nodes", 30
    assert fuzz("once_pass", tmp_path, *arguments) == 1
    [path] = tmp_path.glob("*.fxgraph")
    assert "the pass remembers, or draws" in capsys.readouterr().err
    graphtext.parse(path.read_text())


def test_a_failure_that_is_interrupted_is_written(tmp_path, monkeypatch, capsys):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Reduction, "run", interrupted)
    assert fuzz("crash_pass", tmp_path, "--minutes", 0.5, "--nodes", 30) == 1
    assert "1 failure" in capsys.readouterr().err
    [path] = tmp_path.glob("*.fxgraph")
    graphtext.parse(path.read_text())


def test_files_of_earlier_runs_stay(tmp_path):
    path = tmp_path / "crash_pass_0.fxgraph"
    path.write_text("mine")
    assert fuzz("crash_pass", tmp_path, "--minutes", 0.5, "--nodes", 60, "--failures", 1) == 1
    assert path.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("changed", "refused", "unknown", "status"),
    [(0, 0, 0, 1), (1, 0, 0, 0), (1, 1, 0, 1), (2, 1, 0, 0), (2, 0, 1, 1), (5, 2, 1, 0)],
)
def test_more_than_half_of_the_graphs_have_to_be_judged(
    tmp_path, capsys, monkeypatch, changed, refused, unknown, status
):
    """Without proofs fewer of the changed graphs are judged."""

    def run(self, *how):
        self.tried, self.changed = 9, changed
        self.refused["no"], self.unknown["nobody knows"] = refused, unknown

    monkeypatch.setattr(Fuzzer, "run", run)
    assert fuzz("nothing_pass", tmp_path) == status
    judged, others = changed - unknown, refused + unknown
    words = f"of 9 graphs nothing_pass changed {judged} that could be judged, and {others} were"
    assert (words in capsys.readouterr().err) == (status == 1)


def test_each_failure_counts_once(tmp_path):
    """Failures count by kind and operators: a second graph of the same is no second failure."""
    notes = []
    fuzzer = Fuzzer(second_pass, "second_pass", "identical", 0, tmp_path, notes.append)
    graphs = {}
    for seed, name in enumerate(("neg", "neg", "exp")):
        text = (
            "if I:\n  I[0]: f32[2]\nif fwd:\n  with _:\n"
            f"    a: f32[2] = aten.{name}(I[0])\nif out:\n  out[0] = a\n"
        )
        graphs[seed] = graphtext.parse(text)
        fuzzer._report(graphs[seed], seed, 1, Failure("IndexError", "the pass raises"))
    assert list(fuzzer.found) == ["IndexError: aten.neg.default", "IndexError: aten.exp.default"]
    assert sorted(fuzzer.found.values()) == sorted(tmp_path.iterdir())
    assert "2 failures (" in fuzzer.state(0)


def second_pass(gm, inputs=None):
    return list(gm.graph.nodes)[99]


def graph_of_a_sum(edit=lambda graph, x, total: None):
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(aten.sum.dim_IntList, (x, [0]), {"keepdim": True})
    graph.call_function(aten.neg.default, (x,))
    graph.output((total, x))
    edit(graph, x, total)
    return fx.GraphModule({}, graph)


def set_keepdim(graph, x, total):
    total.kwargs = {"keepdim": False}


def set_dim(graph, x, total):
    total.args = (x, [1])


def set_operator(graph, x, total):
    total.target = aten.mean.dim


def set_name(graph, x, total):
    total.name = "total"


def set_order(graph, x, total):
    total.append(x.next)
    graph.output_node().prepend(total)


def set_results(graph, x, total):
    graph.output_node().args = ((x, total),)


def add_one(graph, x, total):
    graph.call_function(aten.exp.default, (x,))


def erase_one(graph, x, total):
    graph.erase_node(graph.output_node().prev)


@pytest.mark.parametrize(
    "edit",
    [set_keepdim, set_dim, set_operator, set_name, set_order, set_results, add_one, erase_one],
)
def test_a_graph_of_which_anything_was_changed_is_another(edit):
    assert shape_of(graph_of_a_sum()) == shape_of(graph_of_a_sum())
    assert shape_of(graph_of_a_sum()) != shape_of(graph_of_a_sum(edit))


@pytest.mark.parametrize("ends", ["returns", "raises", "is too slow"])
def test_the_timer_and_its_handler_are_as_before_a_pass(ends):
    def mine(number, frame):
        raise AssertionError("the timer of a pass has expired behind it")

    def a_pass(gm, inputs):
        assert signal.getsignal(signal.SIGALRM) is not mine
        if ends == "raises":
            raise KeyError("a")
        if ends == "is too slow":
            time.sleep(30)
        return gm

    before = signal.signal(signal.SIGALRM, mine)
    try:
        with suppress(KeyError, TimeoutError):
            guarded(a_pass, 0.05 if ends == "is too slow" else 60, print)(None, None)
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


DRAWN = """
if I:
  I.x: f32[4, 4]
if fwd:
  with _:
    draw: f32[4, 4] = aten.rand_like(I.x)
    other: f32[4, 4] = aten.rand_like(I.x)
    product: f32[4, 4] = aten.mm(draw, other)
    sum: f32[4, 4] = aten.add.Tensor(product, product)
    y: f32[4, 4] = aten.add.Tensor(sum, I.x)
if out:
  out[0] = y
"""


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        ("aten.addmm(product, draw, other)", True),
        ("aten.addmm(product, other, draw)", False),
        ("aten.addmm(product, draw, draw)", False),
    ],
)
def test_sums_of_drawn_numbers_may_round_otherwise(line, is_right):
    """Drawn numbers are known, so a proof of the graph as it is would compare their roundings."""
    before = graphtext.parse(DRAWN)
    after = graphtext.parse(DRAWN.replace("aten.add.Tensor(product, product)", line))
    assert (judge_graphs(after, before, "reordered", 0) is None) == is_right


TRACED = """
if I:
  I.x: f32[4, 2]
if fwd:
  with _:
    half: bf16[4, 2] = aten._to_copy(I.x, dtype=bf16)
    y: bf16[2, 4] = aten.t(half)
if out:
  out[0] = y
"""


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.empty(4, 2, dtype=torch.bfloat16), None),
        (None, None),
        (
            torch.empty(4, 2),
            'half is [4, 2], torch.bfloat16; its meta["val"] is [4, 2], torch.float32',
        ),
        (torch.empty(4, dtype=torch.bfloat16), "is [4], torch.bfloat16"),
    ],
)
def test_a_traced_value_that_is_not_true_is_a_failure(value, says):
    """A pass may leave none."""
    before, after = graphtext.parse(TRACED), graphtext.parse(TRACED)
    next(node for node in after.graph.nodes if node.name == "half").meta["val"] = value
    failure = judge_graphs(after, before, "reordered", 0)
    assert (failure is None) == (says is None)
    if says is not None:
        assert failure.kind == "metadata"
        assert says in failure.words
        assert judge_graphs(after, after, "reordered", 0) is None, "it was so before the pass"


def test_draws_in_another_order_are_a_failure():
    before = graphtext.parse(DRAWN)
    after = graphtext.parse(DRAWN.replace("mm(draw, other)", "mm(other, draw)"))
    assert judge_graphs(after, before, "reordered", 0) is not None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing_pass", "too little is proven: of "),
        ("refusing_pass", "times: this pass takes sharded graphs"),
    ],
)
def test_a_pass_that_proves_nothing_is_no_success(name, says, tmp_path, capsys):
    assert fuzz(name, tmp_path, "--minutes", 0.003, "--nodes", 5) == 1
    assert says in capsys.readouterr().err


def test_a_pass_that_does_not_end(tmp_path, capsys):
    arguments = "--minutes", 0.01, "--nodes", 3, "--failures", 1, "--timeout", 0.05
    assert fuzz("endless_pass", tmp_path, *arguments) == 1
    assert "TimeoutError: the pass raises TimeoutError" in capsys.readouterr().err


def exit_pass(gm, inputs=None):
    sys.exit(0)


def test_a_pass_that_exits_is_a_failure(tmp_path, capsys):
    """``sys.exit(0)`` in a pass does not end the command as a success does."""
    arguments = "--minutes", 0.5, "--nodes", 3, "--failures", 1
    assert fuzz("exit_pass", tmp_path, *arguments) == 1
    assert "SystemExit: the pass raises SystemExit: 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--minutes", "0"), "--minutes=0.0: give a number above 0"),
        (("--ranks", "1"), "--ranks=1: give 2 or more"),
        (("--minutes", "nan"), "--minutes=nan: give a number above 0"),
        (("--folder", __file__), "cannot be made"),
        (("--at-least", "same"), "--at-least=same: the kinds are identical"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, says, tmp_path, capsys):
    assert fuzz("nothing_pass", tmp_path, *arguments) == 2
    assert says in capsys.readouterr().err


class Shared(nn.Module):
    """Two fresh buffers, which merge_everything_pass makes one."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x):
        one, other = torch.zeros_like(x), torch.zeros_like(x)
        one.fill_(2)
        other.fill_(3)
        return self.up(x * one).tanh() + self.up(x * other).tanh()


def shared():
    return Shared(), torch.ones(2, 4)


def no_inputs():
    return Shared()


def sharded():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return TrainConfig(
        model=Shared,
        step=lambda model, x: model(x).square().mean(),
        batch=lambda step, coordinate: (torch.ones(2, 4),),
        bucket_plan=["up"],
        mesh=mesh,
    )


def test_graphs_of_a_model_run_and_are_text():
    own = graphs_of(shared, "it")[""].gm
    texts = set()
    for seed in range(6):
        gm = generate(seed, 20, model=own)
        gm.graph.lint()
        is_input = [node.op == "placeholder" for node in gm.graph.nodes]
        assert is_input == sorted(is_input, reverse=True), "an input stands behind a node"
        text = graphtext.render(gm)
        assert graphtext.render(graphtext.parse(text)) == text
        gm(*draw_inputs(gm, seed))
        texts.add(text)
    assert len(texts) == 6
    assert "up.weight" in "".join(texts)


def test_a_mistake_is_found_on_a_model(tmp_path, capsys):
    arguments = "--gt-model", f"{__name__}:shared", "--failures", 1, "--nodes", 60
    assert fuzz("merge_everything_pass", tmp_path, *arguments) == 1
    [path] = tmp_path.glob("*.fxgraph")
    text = path.read_text()
    assert "from a model" in text
    assert len([line for line in text.splitlines() if "aten." in line]) <= 6, text


@pytest.mark.second_tier
def test_a_mistake_is_found_on_a_sharded_model(tmp_path):
    """Its average of gradients becomes a sum."""
    arguments = "--gt-model", f"{__name__}:sharded", "--failures", 1, "--ranks", 2
    assert fuzz("add_gradients_pass", tmp_path, *arguments) == 1
    [path] = tmp_path.glob("*.fxgraph")
    assert "reduce_scatter_tensor" in path.read_text()


def add_gradients_pass(gm, inputs=None):
    """Takes a sum over ranks for a mean."""
    target = torch.ops._c10d_functional.reduce_scatter_tensor.default
    for node in gm.graph.find_nodes(op="call_function", target=target):
        node.args = (node.args[0], "sum", *node.args[2:])
    gm.recompile()
    return gm


def exit_model():
    sys.exit(0)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nowhere:it", "--gt-model=nowhere:it: No module named 'nowhere'"),
        (f"{__name__}:no_inputs", "it returns a model without inputs"),
        (f"{__name__}:sharded", "no graph: ValueError"),
        (f"{__name__}:exit_model", "no graph: SystemExit: 0"),
    ],
)
def test_a_model_that_cannot_be_used(model, says, tmp_path, capsys):
    """A sharded one needs --ranks."""
    assert fuzz("nothing_pass", tmp_path, "--gt-model", model) == 2
    assert says in capsys.readouterr().err
