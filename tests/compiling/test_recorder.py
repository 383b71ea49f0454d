"""gt_compile: graphs of every stage by name, passes, graph breaks, compilations; and nothing of it
stays.
"""

import logging
import threading
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx as inductor
import torch.distributed as dist
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import _functional_collectives as collectives

from pytest_gtrainer import (
    NotRecorded,
    assert_graph,
    assert_same_layout,
    bucket_layout,
    facts,
    graphtext,
    gt_compile,
    peak_memory,
    timeline,
)
from pytest_gtrainer.compiling.record import STAGES, CompiledGraph, CompileRecord
from pytest_gtrainer.compiling.recorder import _Recorder
from pytest_gtrainer.graph.layout import LayoutDifference

MUL, DIV, RELU = torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor, torch.ops.aten.relu.default


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=bias), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.layers = nn.ModuleList(Block(bias and place == 0) for place in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Rescale:
    """A pass behind each relu: times ``by``, divided by ``by``."""

    def __init__(self, by):
        self.by = by

    def __call__(self, graph):
        for node in graph.find_nodes(op="call_function", target=RELU):
            with graph.inserting_after(node):
                times = graph.call_function(MUL, (node, self.by))
            with graph.inserting_after(times):
                back = graph.call_function(DIV, (times, self.by))
            times.meta, back.meta = dict(node.meta), dict(node.meta)
            node.replace_all_uses_with(
                back, delete_user_cb=lambda user, times=times: user is not times
            )


def recorded(model=None, *, lower=False, **options):
    torch.manual_seed(0)
    with gt_compile(lower=lower) as record:
        torch.compile(model or Model(), **options)(torch.randn(4, 16)).sum().backward()
    return record


@pytest.fixture(scope="module")
def record():
    return recorded()


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_names_and_types(record, stage):
    """P1: and no name of Dynamo's."""
    text = graphtext.render(getattr(record, stage))
    assert "L.down.weight: f32[" in text
    assert "L['" not in text
    assert "A[" not in text
    assert ": _" not in text


def test_a_recorded_graph_has_the_text_that_it_has_in_a_backend(record):
    """P1: recorded or not, and as a bare graph."""
    found = []
    torch.compiler.reset()
    torch.compile(Model(), backend=lambda gm, inputs: found.append(gm) or gm)(torch.randn(4, 16))
    text = graphtext.render(record.dynamo)
    assert text == graphtext.render(found[0]) == graphtext.render(found[0].graph)


def test_stages_stand_in_the_order_in_which_they_are_reached(record):
    assert list(record.only.stages) == [stage for stage in STAGES if stage in record.only.stages]
    assert record.only.stages.keys() == STAGES.keys()
    assert record.forward is record[0].forward is record.graphs[0].stages["forward"]


def test_a_graph_behind_the_partitioner_has_one_direction(record):
    directions = {
        stage: {
            node.meta["autograd_backward"]
            for node in getattr(record, stage).graph.nodes
            if node.op[:4] == "call"
        }
        for stage in ("forward", "forward_after_passes", "backward", "backward_after_passes")
    }
    assert directions == {key: {False} for key in list(STAGES)[3:5]} | {
        key: {True} for key in list(STAGES)[5:]
    }


@pytest.fixture(scope="module")
def record_with_bias():
    return recorded(Model(bias=True))


@pytest.mark.parametrize("stage", ["joint", "backward_after_passes"])
def test_one_more_parameter_changes_its_own_lines_only(record, record_with_bias, stage):
    """P2: in what is recorded, too."""
    texts = [graphtext.render(getattr(each, stage)) for each in (record, record_with_bias)]
    lines = [line for line in str(graphtext.diff(*texts)).splitlines() if line[:1] in "+-"]
    assert lines
    assert not [line for line in lines if "layers[1]" in line or "layers[2]" in line]


def test_gradients_that_nobody_needs_leave_the_others_their_names(record):
    outputs = record.joint.graph.output_node()
    found = dict(zip(outputs.meta["gt_outputs"], outputs.args[0], strict=True))
    assert [name for name, leaf in found.items() if leaf is None] == ["x"]
    assert {name for name in found if name != "x"} == {
        "output_0",
        *(name for name, _ in Model().named_parameters()),
    }


def test_goldens_are_named_after_stages(record, gt_golden):
    gt_golden.check(record.joint)
    gt_golden.check(record.forward_after_passes)
    with pytest.raises(ValueError, match="this test has checked a golden named 'joint' already"):
        gt_golden.check(record.joint)
    gt_golden.check(record.passes("pass_pattern_2", changed=True)[0])


def test_the_copies_are_what_the_graphs_were_and_not_what_they_became(record):
    assert "alias" in graphtext.render(record.joint)
    assert "alias" not in graphtext.render(record.joint_after_passes)
    assert "addmm" not in graphtext.render(record.forward)
    assert "addmm" in graphtext.render(record.forward_after_passes)


def test_without_lowering_operators_are_those_of_eager():
    model, x = Model(), torch.randn(4, 16)
    with gt_compile() as record:
        result = torch.compile(model)(x)
    assert torch.equal(result, model(x))
    assert not record[0].code
    with pytest.raises(NotRecorded, match="lower=False generates none: record with gt_compile"):
        record[0].launches()


@pytest.mark.second_tier
def test_lowered_code_says_what_it_launches():
    """P5: in order, by direction."""
    record = recorded(lower=True)
    launches = record[0].launches()
    assert [name for name in launches if name.startswith("extern_kernels.")]
    assert record[0].launches("backward")
    record.assert_launch_order("extern_kernels.mm", "cpp_fused_relu_0", "addmm", "mm")
    with pytest.raises(
        AssertionError,
        match=r"does not launch 'extern_kernels.mm' after 'cpp_fused_relu_9'|'cpp_fu",
    ):
        record.assert_launch_order("cpp_fused_relu_9", "extern_kernels.mm")
    with pytest.raises(
        AssertionError,
        match="the forward does not launch 'mm' after 'addmm'; it launches\n    0 extern",
    ):
        record.assert_launch_order("addmm", "addmm", "addmm", "mm")
    with pytest.raises(ValueError, match="an order needs two names or more, and these are 1"):
        record.assert_launch_order("mm")
    assert {stage for stage in STAGES if stage in record[0].stages} == STAGES.keys()


GENERATED = """\
class Runner:
    def call(self, args):
        extern_kernels.mm(of_another_version)
def call(args):
    buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(arg0_1, 2, '0')
    extern_kernels.addmm(arg1_1, arg2_1, out=buf1)
    cpp_fused_relu_0(buf1)
    extern_kernels.mm(buf1, buf0, out=buf2)
"""


def test_an_order_of_launches_is_read_from_generated_code():
    """P5: of the last function, in its order; nothing is compiled here."""
    record = CompileRecord([CompiledGraph("0/0", 0, lower=True, code={"forward": GENERATED})])
    kernels = ["extern_kernels.addmm", "cpp_fused_relu_0", "extern_kernels.mm"]
    gather, *rest = record[0].launches()
    assert gather.endswith("_c10d_functional.all_gather_into_tensor")
    assert rest == kernels
    record.assert_launch_order("*all_gather*", "addmm", "mm")
    with pytest.raises(
        AssertionError, match="the forward does not launch 'addmm' after 'mm'; it launches\n    0 "
    ):
        record.assert_launch_order("mm", "addmm")
    with pytest.raises(AssertionError, match="the forward does not launch 'mm' after 'mm'"):
        record.assert_launch_order("mm", "mm")  # one launch is not behind itself
    with pytest.raises(NotRecorded, match="no generated code of its backward: not compiled"):
        record[0].launches("backward")


# -- passes


@pytest.mark.second_tier("one of several", "a setting", "an option-post_grad_custom_post")
@pytest.mark.parametrize(
    "slot", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass"]
)
@pytest.mark.parametrize("how", ["an option", "a setting", "one of several"])
def test_a_pass_of_the_user_is_seen_before_and_after(slot, how):
    """P4: by its name, in each slot."""
    ours = [Rescale(2.0), lambda graph: None] if how == "one of several" else Rescale(2.0)
    if how == "a setting":
        with torch._inductor.config.patch(slot, ours):
            record = recorded()
    else:
        record = recorded(options={slot: ours})
    run = record.only_pass("Rescale", changed=True)
    assert (run.slot, run.stage) == (slot, "joint" if "joint" in slot else "forward")
    assert [
        len(gm.graph.find_nodes(op="call_function", target=DIV)) for gm in (run.before, run.after)
    ] == [0, 3]
    if how == "one of several":
        [other, *_] = record.passes("<lambda>")
        assert not other.changed
        assert other.before is run.after


def test_a_pass_of_the_user_has_its_name_in_graphs_inside_a_graph():
    """P4: it runs on each body, and then on the graph around it."""
    block = torch.compiler.nested_compile_region(lambda x: torch.relu(x) + 1)
    options = {"post_grad_custom_post_pass": Rescale(2.0)}
    with gt_compile() as record:
        torch.compile(lambda x: block(block(x)).relu(), options=options)(torch.ones(4))
    assert [run.name for run in record.passes("post_grad_custom_post_pass")] == [
        "Rescale",
        "Rescale",
    ]


def test_a_pass_that_finds_nothing_to_do_is_told_apart():
    record = recorded(options={"post_grad_custom_post_pass": Rescale(2.0)})
    forward, backward = record.passes("Rescale")
    assert (forward.changed, backward.changed) == (True, False)
    assert backward.before is backward.after


def test_passes_of_inductor_have_its_names(record):
    names = [run.name for run in record.passes()]
    assert {"remove_noop_ops", "constant_fold_uniform_value", "stable_sort", "pass_pattern_2"} <= {
        *names
    }
    assert [run.stage for run in record.passes("pass_pattern_2", changed=True)] == [
        "forward",
        "backward",
    ]
    with pytest.raises(
        NotRecorded, match=r"no pass 'Missing' ran; these did: .*, remove_noop_ops, "
    ):
        record.passes("Missing")


class RescaleOfCaches(CustomGraphPass):
    """A pass that Inductor's caches may stand for: it has an id."""

    def __call__(self, graph):
        Rescale(2.0)(graph)

    def uuid(self):
        return "always the same"


def test_the_one_run_of_a_pass():
    """P4: another number of runs is a sentence that lists them, and not "too many values to
    unpack".
    """
    record = recorded(options={"post_grad_custom_post_pass": Rescale(2.0)})
    assert record.only_pass("Rescale", changed=True) is record.passes("Rescale", changed=True)[0]
    with pytest.raises(NotRecorded) as several:
        record.only_pass("Rescale")
    slot = "Rescale (post_grad_custom_post_pass)"
    assert str(several.value).splitlines() == [
        "2 runs of 'Rescale', not 1: choose one of record.passes(...), or say changed=True",
        f"  {slot} in forward of graph 0/0, changed",
        f"  {slot} in backward of graph 0/0, nothing changed",
    ]
    record = recorded(options={"post_grad_custom_post_pass": lambda graph: None})
    with pytest.raises(NotRecorded) as none:
        record.only_pass("<lambda>", changed=True)
    slot = "<lambda> (post_grad_custom_post_pass)"
    assert str(none.value).splitlines() == [
        "0 runs of '<lambda>' that changed the graph, not 1: the pass matched nothing",
        f"  {slot} in forward of graph 0/0, nothing changed",
        f"  {slot} in backward of graph 0/0, nothing changed",
    ]
    with pytest.raises(NotRecorded, match="no pass 'Rescail' ran; these did"):
        record.only_pass("Rescail")


@pytest.mark.gt_world("fake", size=2)
def test_a_recorded_pass_stands_where_a_graph_does(gt_world):
    """It is the graph after the pass; a pair of graphs is compared as their layouts are."""

    def step(weight, x):
        return (collectives.all_gather_tensor(weight, 0, dist.group.WORLD) * x).relu()

    with gt_compile() as record, torch.no_grad():
        options = {"post_grad_custom_post_pass": Rescale(2.0)}
        torch.compile(step, options=options)(nn.Parameter(torch.ones(4)), torch.ones(8))
    [run] = record.passes("Rescale", changed=True)
    assert graphtext.render(run) == graphtext.render(run.after) != graphtext.render(run.before)
    assert_graph(run, "then aten.mul\nthen aten.relu\nnext aten.mul", before=run.before)
    assert [sent.label for sent in bucket_layout(run).payloads] == ["weight"]
    assert peak_memory(run).peak == peak_memory(run.after).peak
    assert len(timeline(run).spans) == len(timeline(run.after.graph).spans)
    assert_same_layout(run, run.before.graph)
    with pytest.raises(LayoutDifference, match=r"dtype is torch.bfloat16, expected torch.float32"):
        assert_same_layout(
            torch.export.export(Gathered().bfloat16(), (torch.ones(8).bfloat16(),)), run
        )


class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return collectives.all_gather_tensor(self.weight, 0, dist.group.WORLD) * x


@pytest.mark.second_tier
def test_caches_hide_passes_unless_they_are_off(tmp_path, monkeypatch):
    """P3: a cached compile runs no pass."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for caches in (True, True, False):
        with gt_compile(lower=True, caches=caches) as record:
            compiled = torch.compile(
                Model(), options={"post_grad_custom_post_pass": RescaleOfCaches()}
            )
            compiled(torch.randn(4, 16)).sum().backward()
        found.append(
            [run.name for graph in record for run in graph.passes].count("RescaleOfCaches")
        )
        hits = sum(times for event, times in record.cache.items() if event.endswith("cache_hit"))
        if len(found) == 2:
            assert hits
            with pytest.raises(NotRecorded, match="no pass 'RescaleOfCaches' ran; these did: "):
                record.passes("RescaleOfCaches")
    assert found == [2, 0, 2]


def test_each_use_of_a_cache_is_counted():
    record = CompileRecord()
    recorder = _Recorder(record, lower=False)
    names = ["fx_graph_cache_hit", "fx_graph_cache_miss", "fx_graph_cache_hit", "other"]
    for name in names:
        recorder._read({"artifact": {"name": name}}, None)
    assert record.cache == {"fx_graph_cache_hit": 2, "fx_graph_cache_miss": 1}


# -- graph breaks, compilations


def broken(x):
    print("!")
    return x.relu()


def test_graph_breaks_and_recompilations_say_where_and_why(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])  # places are relative to this folder
    with gt_compile() as record:
        compiled = torch.compile(broken, dynamic=False)
        for size in (2, 3, 4):
            compiled(torch.ones(size))
    here = Path(__file__).relative_to(Path.cwd())
    with pytest.raises(
        AssertionError, match=rf"^1 graph break:\n  {here}:\d+: Failed to trace builtin"
    ):
        record.assert_no_graph_breaks()
    record.assert_compiles(1, recompiles=2)
    message = r"expected 1 graph and 0 recompilations, found 1 graph and 2 recompilations\n(?s:.*)actual 3"
    with pytest.raises(AssertionError, match=message):
        record.assert_compiles(1)
    message = "3 graphs were compiled, because of 1 graph break and 2 recompilations: say which"
    with pytest.raises(NotRecorded, match=message):
        _ = record.forward


def measured(x):
    y = x.relu()
    largest = y.norm().item()
    return torch.clamp(y, max=largest) + 1


def test_a_compilation_that_begins_again_is_one_graph():
    """Until torch 2.14, a number that changes lets Dynamo begin again, after the backend was given
    a graph already.
    """
    with gt_compile() as record:
        compiled = torch.compile(measured)
        for factor in (1.0, 2.0, 3.0):
            compiled(torch.ones(4) * factor)
    names = [graph.id for graph in record]
    assert sorted(set(names)) == names
    assert all("forward" in graph.stages for graph in record)
    record.assert_compiles(2, recompiles=len(names) - 2)
    text = str(record)
    assert "2.0 # return torch.clamp" in text
    assert "  #" not in text
    assert text.startswith(f"CompileRecord of {len(names)} graphs")


def test_behind_a_reset_in_the_block_the_same_number_is_another_graph():
    """The twin: what was compiled to its end is not compiled again."""
    with gt_compile() as record:
        torch.compile(torch.relu)(torch.ones(2))
        torch._dynamo.reset()
        torch.compile(torch.sin)(torch.ones(2))
    assert [graph.id for graph in record] == ["0/0", "0/0"]
    for graph, operator in zip(record, ("relu", "sin"), strict=True):
        assert_graph(graph.forward, f"count 1 aten.{operator}")


def test_two_reasons_in_one_line_are_two_graph_breaks():
    def breaks_twice(x):
        torch._dynamo.graph_break(), print("!")
        return x.relu()

    with gt_compile() as record:
        compiled = torch.compile(breaks_twice, dynamic=False)
        compiled(torch.ones(2))
        compiled(torch.ones(3))
    assert len({each.where for each in record.breaks}) == 1
    assert len({each.reason for each in record.breaks}) == len(record.breaks) == 2


def test_inputs_of_the_first_call_are_what_it_was_given():
    """P6: also where the function writes to them."""
    x = torch.ones(3)
    with gt_compile() as record:
        torch.compile(lambda x: x.add_(1) * 2)(x)
    [recorded_x] = record[0].inputs["forward"]
    assert (recorded_x.tolist(), x.tolist()) == ([1.0] * 3, [2.0] * 3)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_inputs_are_those_of_the_first_call_whatever_is_called_or_written_later(stage):
    """P6: the backward's, too, which are what the forward kept and a gradient."""
    x = torch.ones(3, requires_grad=True)
    with gt_compile() as record:
        compiled = torch.compile(lambda x: x.sin())
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                x.fill_(value)
            gradient = torch.full((3,), value)
            compiled(x).backward(gradient)
            gradient.zero_()
    record.assert_compiles(1)
    found = [tensor.tolist() for tensor in record[0].inputs[stage]]
    assert found == [[1.0] * 3] * {"forward": 1, "backward": 2}[stage]


def test_one_graph_without_breaks(record):
    record.assert_no_graph_breaks()
    record.assert_compiles(1)
    message = (
        r"expected 2 graphs and 0 recompilations, found 1 graph and 0 recompilations\n  "
        r"compiled 0/0"
    )
    with pytest.raises(AssertionError, match=message):
        record.assert_compiles(2)


def test_several_graphs_must_be_told_apart():
    with gt_compile() as record:
        for function in (lambda x: x.relu(), lambda x: x.sigmoid()):
            torch.compile(function)(torch.ones(2))
    record.assert_compiles(2)
    with pytest.raises(
        NotRecorded, match=r"2 graphs were compiled: say which, record\[0\].forward for one"
    ):
        _ = record.forward
    assert [graph.forward.meta["gt_stage"] for graph in record] == ["forward", "1.forward"]
    with pytest.raises(NotRecorded, match="there is no compiled graph 2: 2 were recorded"):
        record[2]


def test_a_pass_of_inductor_that_is_called_like_its_switch_keeps_its_name():
    assert torch._inductor.config.reorder_for_locality is True
    with gt_compile() as record, torch.no_grad():
        torch.compile(torch.relu)(torch.ones(2))
    names = {run.name for run in record.passes()}
    assert "reorder_for_locality" in names
    assert "bool" not in names


# -- what cannot be recorded is said


def test_nothing_compiled_inside_the_block():
    with gt_compile() as record:
        torch.compile(torch.relu)
    record.assert_compiles(0)
    for ask in (
        lambda: record.forward,
        record.assert_no_graph_breaks,
        record.passes,
        lambda: record[0],
    ):
        with pytest.raises(
            NotRecorded, match="nothing was compiled inside the block: call the compiled"
        ):
            ask()


@pytest.mark.parametrize(
    ("compiles", "looks", "idle"),
    [
        (False, lambda record: list(record), "gt_compile: nothing was compiled inside the block"),
        (False, lambda record: record.breaks, "gt_compile: nothing was compiled inside the block"),
        (True, lambda record: list(record), None),
        (
            True,
            lambda record: record.passes("remove_noop_ops", changed=True),
            "record.passes: no run of remove_noop_ops changed its graph",
        ),
        (
            True,
            lambda record: record.passes(changed=True),
            "record.passes: no run of a pass changed its graph",
        ),
        (True, lambda record: record.passes("remove_noop_ops"), None),
        (True, lambda record: record.passes("remove_noop_ops", changed=False), None),
    ],
    ids=["graphs", "breaks", "a graph", "a changed run", "any changed run", "a run", "an idle run"],
)
def test_a_loop_that_finds_nothing_to_check_is_counted(compiles, looks, idle):
    """A loop over no graph, or over no run that changed one, was green without a word."""
    with facts.collecting() as collected:
        with gt_compile() as record, torch.no_grad():
            compiled = torch.compile(torch.relu)
            if compiles:
                compiled(torch.ones(2))
        looks(record)
    found = [fact["what"] for fact in facts.of_kind(collected, "idle")]
    assert found == ([] if idle is None else [idle])


def test_a_backend_that_is_not_inductor():
    with gt_compile() as record:
        torch.compile(torch.relu, backend="aot_eager")(torch.ones(2))
    record.assert_compiles(1)
    record.assert_no_graph_breaks()
    with pytest.raises(
        NotRecorded, match=r"has no stage 'forward', .*: its backend is not Inductor"
    ):
        _ = record.forward


def test_no_backward():
    with gt_compile() as record:
        torch.compile(Model())(torch.randn(4, 16))
    with pytest.raises(
        NotRecorded,
        match=r"has no stage 'backward', .*: nothing called backward\(\) inside the block",
    ):
        _ = record.backward
    with pytest.raises(
        AttributeError, match="'backwards': a record has the stages dynamo, joint, "
    ):
        _ = record.backwards


@pytest.mark.second_tier
def test_another_thread():
    def compile_there():
        torch.compile(torch.relu)(torch.ones(2))

    with gt_compile() as record:
        thread = threading.Thread(target=compile_there, name="elsewhere")
        thread.start()
        thread.join()
    with pytest.raises(
        NotRecorded, match="thread 'elsewhere' compiled, and this records what 'MainThread' does"
    ):
        _ = record.forward


@pytest.mark.second_tier
def test_another_thread_while_this_one_compiles():
    """Through Inductor itself, which takes no lock of Dynamo's."""

    def compile_there():
        gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
        with torch.no_grad():
            torch._inductor.compile(gm, [torch.ones(2, 4)])(torch.ones(2, 4))

    def starts_another(graph):
        thread = threading.Thread(target=compile_there, name="elsewhere")
        thread.start()
        thread.join()

    with gt_compile() as record, torch.no_grad():
        torch.compile(torch.relu, options={"post_grad_custom_post_pass": starts_another})(
            torch.ones(2)
        )
    with pytest.raises(
        NotRecorded, match="thread 'elsewhere' compiled, and this records what 'MainThread' does"
    ):
        _ = record.forward


@pytest.mark.second_tier("True")
@pytest.mark.parametrize("lower", [False, True])
def test_a_backward_that_is_compiled_behind_the_block(lower):
    with gt_compile(lower=lower) as record:
        result = torch.compile(Model(), options={"post_grad_custom_post_pass": Rescale(2.0)})(
            torch.randn(4, 16)
        )
    assert [run.stage for run in record.passes("Rescale")] == ["forward"]
    result.sum().backward()
    assert "aten.mul" in graphtext.render(record.forward_after_passes)
    with pytest.raises(
        NotRecorded, match=r"stage 'backward', .*: it was first compiled after the block"
    ):
        _ = record.backward
    with pytest.raises(
        NotRecorded,
        match=r"the passes of the backward of compiled graph 0/0 are not known: it was ",
    ):
        record.passes("Rescale")


def test_an_operator_without_a_fake_kernel():
    @torch.library.custom_op("gtrainer_tests::without_a_fake_kernel", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(Exception, match="There was no fake impl") as caught, gt_compile():
        torch.compile(lambda x: operator(x) + 1)(torch.ones(2))
    assert (
        "gt_compile: gtrainer_tests::without_a_fake_kernel has no fake kernel"
        in caught.value.__notes__[0]
    )


def test_an_operator_without_a_fake_kernel_by_define():
    """Dynamo breaks the graph there, and names it only in what is for its developers."""
    name = "gtrainer_tests::defined_without_a_fake_kernel"
    with torch.library._scoped_library("gtrainer_tests", "FRAGMENT") as library:
        library.define("defined_without_a_fake_kernel(Tensor x) -> Tensor")
        library.impl("defined_without_a_fake_kernel", lambda x: x * 2, "CPU")

        def function(x):
            return torch.ops.gtrainer_tests.defined_without_a_fake_kernel(x.relu()) + 1

        with gt_compile() as record:
            torch.compile(function)(torch.ones(2))
        advice = f'register one with torch.library.register_fake("{name}")'
        message = f"{name} has no fake kernel, without which it is in no graph: {advice}"
        assert [each.reason for each in record.breaks] == [message]
        with (
            pytest.raises(Exception, match="does not support running with fake tensors") as caught,
            gt_compile(),
        ):
            torch.compile(function, fullgraph=True)(torch.ones(2))
        assert caught.value.__notes__ == [f"gt_compile: {message}"]


def test_fullgraph_ends_at_the_first_break():
    with pytest.raises(Exception, match="Failed to trace builtin operator") as caught, gt_compile():
        torch.compile(broken, fullgraph=True)(torch.ones(2))
    assert caught.value.__notes__[0].startswith(
        "gt_compile: fullgraph=True ends at the first graph break; without it"
    )


def test_one_recorder_at_a_time():
    with (
        gt_compile(),
        pytest.raises(RuntimeError, match="gt_compile is open already"),
        gt_compile(),
    ):
        pass
    recorded()


# -- nothing stays


def test_everything_is_put_back_also_behind_an_error(monkeypatch):
    """P3: settings, handlers, Dynamo."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", True)
    recorded()
    assert logging.getLogger("torch.__trace").propagate

    def state():
        config = torch._inductor.config, torch._functorch.config, torch._dynamo.config
        log = logging.getLogger("torch.__trace")
        return inductor.compile_fx, tuple(log.handlers), [each.get_config_copy() for each in config]

    def fails():
        with gt_compile():
            torch.compile(torch.relu)(torch.ones(2))
            raise KeyError

    before = state()
    with pytest.raises(KeyError):
        fails()
    assert state() == before
    calls = []
    torch.compile(torch.relu, backend=lambda gm, inputs: calls.append(gm) or gm)(torch.ones(2))
    assert len(calls) == 1  # what the block compiled is forgotten


def test_without_dynamo():
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    with gt_compile() as record, torch.no_grad():
        torch._inductor.compile(gm, [torch.ones(2, 4)])(torch.ones(2, 4))
    assert [graph.id for graph in record] == ["-"]
    assert "aten.addmm" in graphtext.render(record.forward)


def test_the_fixture_is_the_context_manager(gt_compile):
    with gt_compile() as record:
        torch.compile(torch.relu)(torch.ones(2))
    record.assert_compiles(1)


@pytest.mark.parametrize("when", ["Dynamo", "Inductor"])
def test_a_failed_compilation_is_never_replaced_by_eager_code(when):
    def fails(*_):
        raise ZeroDivisionError("no code")

    backend, patches = ("inductor", {"post_grad_custom_post_pass": fails})
    if when == "Dynamo":
        backend, patches = fails, {}
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        torch._inductor.config.patch(patches),
        pytest.raises(Exception, match="no code"),
        gt_compile(),
    ):
        torch.compile(torch.relu, backend=backend)(torch.ones(2))
