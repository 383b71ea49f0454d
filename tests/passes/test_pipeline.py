"""The pipeline: what runs, in which order, with which options, and what it leaves behind."""

import copy
import enum
import functools
from dataclasses import dataclass, field

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    ChunkConfig,
    LossConfig,
    apply_graph_passes,
    bind_options,
    canonicalize_graph_pass,
    construct_default_graph_passes,
    eliminate_dead_code_pass,
    facts,
    get_default_transformer_block_buckets,
    graphtext,
    tag_with_memory_policy_pass,
)
from pytest_gtrainer.passes.graph_pass import WrittenConstantError, graph_pass
from pytest_gtrainer.passes.pipeline import SLOTS

# the passes that always run, in order: a new one is named here
OURS = [
    "eliminate_dead_code_pass",
    "canonicalize_graph_pass",
    "deduplicate_fsdp_unshard_chains_pass",
    "reassign_collective_pgs_pass",
    "joint_transformer_block_bucketing_reordering_pass",
]


def marked_pass(gm, example_inputs=None, *, mark="seen"):
    """A pass of a trainer's own, of the usual form."""
    for node in gm.graph.nodes:
        node.meta[mark] = True
    gm.recompile()
    return gm


@graph_pass
def half_way_pass(gm, example_inputs=None):
    """Fails when it has done half of its work."""
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    first.meta["mark"] = True
    first.replace_all_uses_with(next(iter(gm.graph.nodes)))
    gm.graph.erase_node(first)
    raise RuntimeError("half way")


NEG_OF_DETACH = """
if A:
  A[0]: f32[2]
if fwd:
  detach: f32[2] = aten.detach(A[0])
  exp: f32[2] = aten.exp(A[0])  # nobody reads it
  neg: f32[2] = aten.neg(detach)
if out:
  yield neg
"""


@pytest.fixture
def neg_of_detach():
    return graphtext.parse(NEG_OF_DETACH)


def operators(gm):
    return [
        node.name.removesuffix("_default") for node in gm.graph.nodes if node.op == "call_function"
    ]


def test_the_order_of_passes():
    """M1: the caller's run in their slots."""
    extra = {slot: [bind_options(marked_pass, mark=slot)] for slot in reversed(SLOTS)}
    passes = construct_default_graph_passes(n_layers=2, extra=extra)
    slots = dict(
        zip(
            OURS,
            ["dead_code", "canonicalize", "deduplicate", "process_groups", "bucketing"],
            strict=True,
        )
    )
    found = [slots.get(step.name) or step.options.get("mark", step.name) for step in passes]
    assert list(dict.fromkeys(found)) == list(SLOTS)
    assert [step.name for step in construct_default_graph_passes(n_layers=2)] == OURS


def test_every_option_reaches_its_pass():
    """M1, M3: with all that is off by default switched on, and the plan of a model with experts."""
    chunk = ChunkConfig("layers.*.moe")
    experts = {"moe_layers": [1], "expert_fsdp_degree": 2}
    passes = construct_default_graph_passes(
        n_layers=2,
        payload_order="execution",
        reorder=False,
        reduce_scatter_first=True,
        reshard_after_forward=True,
        keep_unsharded=["norm"],
        canonical_rules=("view",),
        chunk=chunk,
        schedule_chunks=True,
        **experts,
    )
    plan = get_default_transformer_block_buckets(2, **experts)
    assert [(step.name, dict(step.options)) for step in passes] == [
        ("eliminate_dead_code_pass", {}),
        ("canonicalize_graph_pass", {"rules": ("view",)}),
        ("deduplicate_fsdp_unshard_chains_pass", {}),
        (
            "tag_with_memory_policy_pass",
            {"reshard_after_forward": True, "keep_unsharded": ["norm"]},
        ),
        ("selective_activation_remat_pass", {}),
        ("chunk_pass", {"config": chunk}),
        ("chunk_schedule_pass", {}),
        ("reassign_collective_pgs_pass", {}),
        ("reduce_scatter_before_all_reduce_pass", {}),
        (
            "joint_transformer_block_bucketing_reordering_pass",
            {"bucket_plan": plan, "payload_order": "execution", "reorder": False},
        ),
    ]


@pytest.mark.parametrize(
    ("loss", "last"),
    [
        (None, ["norm", "lm_head"]),
        (LossConfig(), ["norm", "lm_head"]),
        (LossConfig("other"), ["norm", "lm_head"]),
        (LossConfig("chunked_cross_entropy", 8), ["norm", "lm_head", "loss"]),
        (LossConfig("chunked_cross_entropy", 1), ["norm", "lm_head", "loss"]),
    ],
)
def test_the_loss_is_in_the_last_bucket_if_it_is_chunked_cross_entropy(loss, last):
    """B2: the builder decides, from the kind of loss and not from the number of its chunks."""
    *_, bucketing = construct_default_graph_passes(n_layers=1, loss=loss)
    assert bucketing.options["bucket_plan"] == ["tok_embeddings", "layers.0", last]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "give either n_layers, .* or a bucket_plan by hand"),
        ({"n_layers": 1, "bucket_plan": ["norm"]}, "give either n_layers"),
        ({"bucket_plan": ["norm"], "loss": LossConfig()}, "leave loss out"),
        (
            {"n_layers": 1, "extra": {"prefetch": [], "sac": []}},
            "no slot 'prefetch', 'sac'; there are dead_code, can",
        ),
    ],
)
def test_a_pipeline_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        construct_default_graph_passes(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("chunked_ce", 2), "the loss 'chunked_ce' is not known: choose one of cross_entropy, "),
        (
            ("cross_entropy", 2),
            "2 chunks of the loss 'cross_entropy': only 'chunked_cross_entropy' has",
        ),
        (("chunked_cross_entropy", 0), "0 chunks of the loss"),
    ],
)
def test_a_loss_that_does_not_exist_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        LossConfig(*arguments)


def test_options_are_bound_when_the_list_is_built(neg_of_detach):
    """M3: later changes of the caller's list do not matter, and a wrong option is reported
    at once.
    """
    marks = ["seen"]

    def marking_pass(gm, example_inputs=None, *, marks, more=()):
        gm.meta["marks"] = [*marks, *more]
        return gm

    step = bind_options(marking_pass, marks=marks)
    marks.append("late")
    assert apply_graph_passes(neg_of_detach, None, [step]).meta["marks"] == ["seen"]
    with pytest.raises(
        TypeError, match=r"marking_pass has no option mark, sign; its options are marks, more$"
    ):
        bind_options(marking_pass, sign=0, marks=[], mark=1)
    with pytest.raises(TypeError, match=r"marking_pass needs the option marks$"):
        bind_options(marking_pass, more=["seen"])
    with pytest.raises(
        TypeError, match="eliminate_dead_code_pass has no option mark; its options are none"
    ):
        bind_options(eliminate_dead_code_pass, mark=1)


def test_a_pass_is_given_the_example_inputs(neg_of_detach):
    """M3: passes may be ours, a trainer's own, or a list of them; None adds none."""
    seen = []

    def noting_pass(gm, example_inputs=None):
        seen.append(example_inputs)
        return gm

    passes = [
        bind_options(noting_pass),
        bind_options(graph_pass(lambda gm, inputs=None: noting_pass(gm, inputs))),
    ]
    given = [torch.ones(2)]
    apply_graph_passes(neg_of_detach, given, passes)
    apply_graph_passes(neg_of_detach, None, passes)
    assert seen[0] is seen[1] is given
    assert seen[2:] == [None, None]


def test_a_twin_goes_through_the_passes_in_front_of_the_one_that_reads_it(neg_of_detach):
    """G12: as a copy, without the example inputs, which are not its own; what comes behind runs on
    the result alone.
    """
    twin, given, seen = graphtext.parse(NEG_OF_DETACH), [torch.ones(2)], []

    def noting_pass(gm, example_inputs=None):
        seen.append(("noting", operators(gm), example_inputs))
        return gm

    def reading_pass(gm, example_inputs=None, *, twin=None):
        assert twin is not gm
        seen.append(("reading", operators(twin), example_inputs))
        return gm

    steps = [
        eliminate_dead_code_pass,
        noting_pass,
        reading_pass,
        noting_pass,
        canonicalize_graph_pass,
    ]
    result = apply_graph_passes(neg_of_detach, given, map(bind_options, steps), twin=twin)
    left = ["detach", "neg"]
    assert [name for name, _, _ in seen] == ["noting", "noting", "reading", "noting"]
    assert [found for _, found, _ in seen] == [left] * 4
    assert [inputs for _, _, inputs in seen] == [given, None, given, given]
    assert operators(result) == ["neg"]
    assert operators(twin) == ["detach", "exp", "neg"]


def test_an_unknown_name_to_disable_is_refused_with_the_names(neg_of_detach):
    """M4: and a known one is left out."""
    passes = construct_default_graph_passes(n_layers=1)
    with pytest.raises(
        ValueError, match=r"no pass 'bucketing' \(a slot\), 'remut' to disable; there are"
    ):
        apply_graph_passes(neg_of_detach, None, passes, disable=["bucketing", OURS[0], "remut"])
    assert operators(apply_graph_passes(neg_of_detach, None, passes)) == ["neg"]
    kept = apply_graph_passes(neg_of_detach, None, passes, disable="eliminate_dead_code_pass")
    assert operators(kept) == ["exp", "neg"]


def test_options_have_a_stable_fingerprint():
    """M6: written down here, so that another process, machine or order of a set would be seen."""
    step = bind_options(marked_pass, mark={"b", "a", "c"})
    assert str(step) == "marked_pass(mark={'a', 'b', 'c'})"
    assert step.fingerprint == "268c5ccb4814"
    assert len({step, bind_options(marked_pass, mark={"c", "b", "a"})}) == 1
    others = [
        {"a"},
        "a",
        ["a"],
        torch.bfloat16,
        LossConfig(),
        LossConfig("other"),
        {"a": 1},
        None,
        1.0,
        1,
    ]
    assert len({bind_options(marked_pass, mark=value).fingerprint for value in others}) == len(
        others
    )
    tables = [{"b": 1, "a": {3, 2}}, {"a": {2, 3}, "b": 1}]
    found = {str(bind_options(marked_pass, mark=table)) for table in tables}
    assert found == {"marked_pass(mark={'a': {2, 3}, 'b': 1})"}, (
        "a table has one text, in whichever order it was made"
    )


def test_an_option_without_a_fingerprint_is_refused():
    """M6: the text of such an object is its address."""
    with pytest.raises(
        TypeError,
        match=r"marked_pass\(mark=...\) is a object, which has no fingerprint: options are",
    ):
        bind_options(marked_pass, mark=object())


def test_one_lint_and_one_recompile(monkeypatch, neg_of_detach):
    """Whatever the number of passes, also of those that recompile on their own; the input's code
    stays.
    """
    calls = []
    for name in ("lint", "python_code"):
        original = getattr(fx.Graph, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            calls.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(fx.Graph, name, counted)
    passes = construct_default_graph_passes(
        n_layers=1, extra={"offload": [bind_options(marked_pass)] * 3}
    )
    result = apply_graph_passes(neg_of_detach, None, passes)
    assert sorted(calls) == ["lint", "python_code"]
    assert type(result).__mro__[1] is fx.GraphModule
    assert torch.equal(result(torch.ones(2))[0], -torch.ones(2))


def test_a_pass_that_fails_leaves_the_input_graph_untouched(neg_of_detach):
    """D11: nodes, metadata and code; the error names the pass."""
    before = copy.deepcopy(neg_of_detach)
    passes = [
        *construct_default_graph_passes(n_layers=1)[:1],
        bind_options(marked_pass),
        bind_options(half_way_pass),
    ]
    with pytest.raises(RuntimeError, match="half way") as failure:
        apply_graph_passes(neg_of_detach, None, passes)
    assert failure.value.__notes__ == ["in the graph pass half_way_pass()"]
    assert operators(neg_of_detach) == operators(before)
    assert [list(node.meta) for node in neg_of_detach.graph.nodes] == [
        list(node.meta) for node in before.graph.nodes
    ]
    assert neg_of_detach.code == before.code


def test_the_observer_sees_the_graph_before_and_after_each_pass(neg_of_detach):
    """Both stay as they were at that time: a bisection runs them later."""
    seen = []
    passes = construct_default_graph_passes(n_layers=1)[:2]
    apply_graph_passes(neg_of_detach, None, passes, observer=lambda *step: seen.append(step))
    assert [(name, operators(before), operators(after)) for name, before, after in seen] == [
        (OURS[0], ["detach", "exp", "neg"], ["detach", "neg"]),
        (OURS[1], ["detach", "neg"], ["neg"]),
    ]
    assert torch.equal(seen[0][1](torch.ones(2))[0], seen[1][2](torch.ones(2))[0])


def test_progress_is_told_on_long_pipelines(neg_of_detach):
    lines = []
    passes = construct_default_graph_passes(n_layers=1)
    apply_graph_passes(neg_of_detach, None, passes, progress=lines.append)
    assert lines == []
    apply_graph_passes(neg_of_detach, None, passes, progress=lines.append, long=0)
    assert [line.split(",")[0] for line in lines] == [
        f"graph passes: {name} ({number} of 5)" for number, name in enumerate(OURS, 1)
    ]


def test_progress_goes_to_a_watching_terminal_else_to_the_error_stream(
    neg_of_detach, monkeypatch, capsys
):
    monkeypatch.setattr(facts, "_watchers", [])  # whoever watches this run
    steps, lines = construct_default_graph_passes(n_layers=1)[:2], []
    with facts.watching({"progress": lambda text: lines.append(text)}):
        apply_graph_passes(neg_of_detach, None, steps, long=0)
    assert [line.split(",")[0] for line in lines] == [
        f"graph passes: {name} ({number} of 2)" for number, name in enumerate(OURS[:2], 1)
    ]
    assert capsys.readouterr() == ("", "")
    apply_graph_passes(neg_of_detach, None, steps, long=0)
    out, err = capsys.readouterr()
    assert not out
    assert [line.split(",")[0] for line in err.splitlines()] == [
        line.split(",")[0] for line in lines
    ]


def test_the_result_tells_what_was_run(neg_of_detach):
    """Names, fingerprints and seconds."""
    passes = construct_default_graph_passes(n_layers=1)
    result = apply_graph_passes(neg_of_detach, None, passes, disable=OURS[1:3])
    runs = result.meta["gt_passes"]
    assert [(run.name, run.fingerprint) for run in runs] == [
        (step.name, step.fingerprint) for step in passes if step.name not in OURS[1:3]
    ]
    assert all(run.seconds > 0 for run in runs)
    assert "gt_passes" not in neg_of_detach.meta


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
def test_the_pipeline_on_its_own_output_changes_nothing(joint, plan):
    """E7: of the joint graph of a sharded model, which has its buckets then."""
    passes = construct_default_graph_passes(bucket_plan=plan, require_buckets=True)
    once = apply_graph_passes(joint.gm, joint.example_inputs, passes)
    assert apply_graph_passes(once, joint.example_inputs, passes).code == once.code != joint.gm.code


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
def test_a_step_in_the_place_of_its_graph_is_refused(joint):
    with pytest.raises(TypeError, match=r"takes a GraphModule, not a TracedStep: give its \.gm"):
        apply_graph_passes(joint, joint.example_inputs, [])


def test_a_graph_without_an_output_is_refused():
    graph = torch.fx.Graph()
    graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(ValueError, match="no output node: end it with"):
        apply_graph_passes(gm, None, [])
    with pytest.raises(ValueError, match="no output node: end it with"):
        canonicalize_graph_pass(gm)


def test_what_is_no_pass_is_refused_by_name(neg_of_detach):
    """M3: what cannot be called, one that returns nothing, and something else than a graph."""
    with pytest.raises(
        TypeError, match=r"pass 1 of the list is 'exp': give a function gm -> gm, or bind_options"
    ):
        apply_graph_passes(neg_of_detach, None, [marked_pass, "exp"])

    def forgetful_pass(gm, example_inputs=None):
        gm.recompile()

    with pytest.raises(
        TypeError, match="this one returned None: is `return gm` missing"
    ) as failure:
        apply_graph_passes(neg_of_detach, None, [bind_options(forgetful_pass)])
    assert failure.value.__notes__ == ["in the graph pass forgetful_pass()"]
    with pytest.raises(
        TypeError, match="canonicalize_graph_pass was given a Linear: expected a GraphModule"
    ):
        canonicalize_graph_pass(torch.nn.Linear(2, 2))


@dataclass(frozen=True)
class Sized:
    """An option; ``seen`` cannot distinguish two of them."""

    size: int
    seen: int = field(default=0, compare=False)


def test_options_that_are_equal_have_one_fingerprint():
    """M6: what does not count when two dataclasses are compared does not count here."""
    steps = [
        bind_options(marked_pass, mark=value)
        for value in (Sized(1, seen=1), Sized(1, seen=2), Sized(2))
    ]
    assert str(steps[0]) == "marked_pass(mark=Sized(size=1))"
    assert steps[0].fingerprint == steps[1].fingerprint != steps[2].fingerprint


class Renaming:
    """A pass that is no function."""

    def __call__(self, gm, example_inputs=None, *, to="renamed"):
        gm.meta["name"] = to
        return gm


def test_a_pass_that_is_an_object_has_the_name_of_its_class(neg_of_detach):
    """M3, M6: the name is in its fingerprint, in reports of the run, and where it is not bound."""
    step = bind_options(Renaming(), to="net")
    assert str(step) == "Renaming(to='net')"
    result = apply_graph_passes(neg_of_detach, None, [step])
    assert ([run.name for run in result.meta["gt_passes"]], result.meta["name"]) == (
        ["Renaming"],
        "net",
    )
    assert apply_graph_passes(neg_of_detach, None, [step, Renaming()]).meta["name"] == "renamed"
    with pytest.raises(TypeError, match="Renaming has no option into; its options are to"):
        bind_options(Renaming(), into="net")


def test_a_plain_function_is_a_pass(neg_of_detach):
    """M3: of a GraphModule or, as Inductor's, of a Graph; without ``bind_options``."""

    def exp_for_neg(gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default):
            node.target = torch.ops.aten.exp.default
        return gm

    def neg_for_exp(graph: torch.fx.Graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default):
            node.target = torch.ops.aten.neg.default

    def targets(*passes):
        return [
            node.target for node in apply_graph_passes(neg_of_detach, None, passes).graph.nodes
        ][-3:-1]

    exp, neg = torch.ops.aten.exp.default, torch.ops.aten.neg.default
    assert [targets(), targets(exp_for_neg), targets(exp_for_neg, neg_for_exp)] == [
        [exp, neg],
        [exp] * 2,
        [neg] * 2,
    ]


def test_a_pass_that_must_change_the_graph_is_refused_if_it_does_not(neg_of_detach):
    """The twin is the first call; a word is one name, and a name that does not run is reported."""
    passes = construct_default_graph_passes(n_layers=1)
    apply_graph_passes(neg_of_detach, None, passes, require_changes="canonicalize_graph_pass")
    idle = ["deduplicate_fsdp_unshard_chains_pass", "canonicalize_graph_pass"]
    with pytest.raises(
        AssertionError, match="deduplicate_fsdp_unshard_chains_pass changed nothing in the graph"
    ):
        apply_graph_passes(neg_of_detach, None, passes, require_changes=idle)
    with pytest.raises(
        ValueError, match="no pass 'chunk_pass' to require; there are eliminate_dead_"
    ):
        apply_graph_passes(neg_of_detach, None, passes, require_changes=["chunk_pass"])


def tags(gm, example_inputs=None):
    for node in gm.graph.nodes:
        node.meta.setdefault("custom", {})["seen"] = "yes"
    return gm


def renames(gm):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default):
        node.target = torch.ops.aten.exp.default
    return gm


@pytest.mark.parametrize(
    ("a_pass", "idle"),
    [
        (tags, [1]),
        (renames, [1]),
        (lambda gm: gm, [0, 1]),
        (lambda graph: None, [0, 1]),
        (canonicalize_graph_pass, []),
    ],
    ids=["tags", "rewrites", "nothing", "nothing by Inductor's signature", "ours"],
)
def test_a_pass_that_found_nothing_is_told_and_a_tag_is_something(neg_of_detach, a_pass, idle):
    """Two runs of the pass in a row: those that changed nothing are reported."""
    bound = bind_options(a_pass)
    with facts.collecting() as collected:
        apply_graph_passes(neg_of_detach, None, [bound, bound])
    assert [fact["what"] for fact in collected if fact["kind"] == "idle"] == [
        f"{bound.name} changed nothing"
    ] * len(idle)


def test_a_plan_for_a_graph_without_fsdp_is_told_and_can_be_refused(pytester):
    """A forgotten ``data_parallel``, and names of modules that do not exist: the run stayed green
    and silent.
    """
    pytester.makepyfile(
        """
        import pytest, torch
        from pytest_gtrainer import apply_graph_passes, construct_default_graph_passes, trace_step

        def test_forgotten():
            step = lambda model, x: model(x).sum()
            traced = trace_step(torch.nn.Linear(4, 4), step, (torch.ones(2, 4),))
            passes = construct_default_graph_passes(bucket_plan=["blocks.0"])
            apply_graph_passes(traced.gm, traced.example_inputs, passes)
            passes = construct_default_graph_passes(bucket_plan=["blocks.0"], require_buckets=True)
            refused = "no collective of FSDP to bucket: was data_parallel.model, mesh. app"
            with pytest.raises(Exception, match=refused):
                apply_graph_passes(traced.gm, traced.example_inputs, passes)
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["idle      2 bucketing: no collective of FSDP in the graph: was data_*"]
    )


def test_a_word_is_one_name_not_its_letters(neg_of_detach):
    assert operators(canonicalize_graph_pass(neg_of_detach, rules="detach")) == ["exp", "neg"]
    with pytest.raises(
        ValueError, match="keep_unsharded names 'norm', of which no parameter is gathered"
    ):
        tag_with_memory_policy_pass(neg_of_detach, keep_unsharded="norm")
    ran = []

    def note(gm):
        ran.append("note")
        return gm

    def note_again(gm):
        ran.append("note_again")
        return gm

    apply_graph_passes(neg_of_detach, None, [note, note_again], disable="note_again")
    assert ran == ["note"], "a pass whose name is a part of the disabled one's still runs"


def test_a_traced_detach_goes_by_its_rule():
    """Since torch 2.14 it is traced as ``alias``."""
    gm = make_fx(lambda x: x.exp().detach().neg())(torch.ones(2))
    assert operators(gm) in (["exp", "detach", "neg"], ["exp", "alias", "neg"])
    assert operators(canonicalize_graph_pass(gm, rules=["detach"])) == ["exp", "neg"]


OUR_NAMES = ("gt_input", "gt_outputs", "gt_managed_order")


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
def test_a_graph_traced_elsewhere_goes_through_the_whole_pipeline(joint, plan):
    """The conventions alone, module names and the backward's marks, give the graph that our
    tracer's names give.
    """
    options = {"reshard_after_forward": True, "keep_unsharded": ["norm", "lm_head"]}
    passes = construct_default_graph_passes(bucket_plan=plan, **options)
    expected = apply_graph_passes(joint.gm, None, passes)
    for node in joint.gm.graph.nodes:
        for name in OUR_NAMES:
            node.meta.pop(name, None)
    assert apply_graph_passes(joint.gm, None, passes).code == expected.code
    for node in joint.gm.graph.nodes:
        node.meta.pop("autograd_backward", None)
    assert apply_graph_passes(joint.gm, None, passes).code != expected.code  # they are what decides


def test_a_collective_of_dtensor_that_nobody_reads_stays():
    """M5: the other ranks issue theirs; the view next to it goes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.view.default, (x, [-1]))
    graph.call_function(torch.ops._dtensor.shard_dim_alltoall.default, (x, 0, 1, "a group"))
    graph.output(x)
    gm = eliminate_dead_code_pass(fx.GraphModule(torch.nn.Module(), graph))
    assert [str(node.target) for node in gm.graph.nodes if node.op == "call_function"] == [
        "_dtensor.shard_dim_alltoall.default"
    ]


def test_who_watches_pipelines_is_given_both_graphs(neg_of_detach):
    """Bisection watches like this: the graph that was given, and the one that all passes made of
    it.
    """
    found = []
    with facts.watching({"graph_passes": lambda given, result: found.append((given, result))}):
        done = apply_graph_passes(neg_of_detach, None, [marked_pass])
    assert found == [(neg_of_detach, done)]
    assert done is not neg_of_detach


def test_an_option_that_is_given_replaces_that_of_a_partial():
    """M3: ``functools.partial`` has given the option before, as a configuration may."""
    given = functools.partial(marked_pass, mark="before")
    assert [str(bind_options(given)), str(bind_options(given, mark="now"))] == [
        "marked_pass(mark='before')",
        "marked_pass(mark='now')",
    ]


class Order(enum.Enum):
    FIRST = 1


def test_enums_and_functions_of_modules_have_a_fingerprint_and_a_lambda_has_none():
    """M6: by their names, which no process changes."""
    step = bind_options(marked_pass, mark=[Order.FIRST, marked_pass])
    assert str(step) == f"marked_pass(mark=[Order.FIRST, {__name__}.marked_pass])"
    with pytest.raises(TypeError, match="is a function, which has no fingerprint"):
        bind_options(marked_pass, mark=lambda: 0)


def test_a_pass_behind_one_that_reads_a_twin_is_named_if_it_leaves_the_graph_out_of_order(
    neg_of_detach,
):
    """E6, G12: to find it, the passes run once more, and need the twin again."""

    def reading_pass(gm, example_inputs=None, *, twin=None):
        assert twin is not None
        return gm

    def turns_round(gm):
        detach, neg = (node for node in gm.graph.nodes if node.name in ("detach", "neg"))
        detach.prepend(neg)
        return gm

    twin = graphtext.parse(NEG_OF_DETACH)
    with pytest.raises(
        RuntimeError, match=r"turns_round left a graph out of order: neg .* reads detach"
    ):
        apply_graph_passes(neg_of_detach, None, [reading_pass, turns_round], twin=twin)


def test_passes_that_are_added_to_a_slot_run_behind_ours():
    """M1: one of a trainer's own that reads buckets finds them."""
    plain = [step.name for step in construct_default_graph_passes(n_layers=1)]
    place = plain.index("joint_transformer_block_bucketing_reordering_pass")
    names = [
        step.name
        for step in construct_default_graph_passes(n_layers=1, extra={"bucketing": [marked_pass]})
    ]
    assert names == [*plain[: place + 1], "marked_pass", *plain[place + 1 :]]


def with_constants():
    """A graph with two tensors of its own, the second inside of a submodule."""

    def function(x):
        return (x + torch.tensor([1.0, 2.0])) * torch.tensor([3.0, 4.0])

    gm = make_fx(function)(torch.ones(2))
    first, second = gm.graph.find_nodes(op="get_attr")
    gm.inner = torch.nn.Module()
    gm.inner.register_buffer("table", getattr(gm, second.target))
    second.target = "inner.table"
    gm.recompile()
    return gm, [first.target, second.target]


def swap(tensor):
    tensor.data = tensor.data * 2


WRITES = {
    "in place": lambda tensor: tensor.mul_(2),
    "through data": lambda tensor: tensor.data.mul_(2),
    "other memory": swap,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
@pytest.mark.parametrize("place", [0, 1])
def test_a_pass_that_writes_to_a_constant_is_refused_by_name(place, write):
    """The graphs before and after it share the tensor, so they would be equal."""
    gm, names = with_constants()

    def writes(gm):
        write(functools.reduce(getattr, names[place].split("."), gm))
        return gm

    def nothing(gm):
        return gm

    words = f"writes writes to the tensor {names[place]} of the graph"
    with pytest.raises(WrittenConstantError, match=words):
        apply_graph_passes(gm, None, [nothing, writes, nothing])


def test_a_pass_that_fails_after_it_has_written_says_so():
    gm, names = with_constants()

    def fails(gm):
        getattr(gm, names[0]).mul_(2)
        raise ValueError("after a write")

    with pytest.raises(ValueError, match="after a write") as failure:
        apply_graph_passes(gm, None, [fails])
    note = f"it has written to the tensor {names[0]}, which the given graph shares"
    assert note in failure.value.__notes__


def test_a_pass_may_replace_a_constant():
    gm, _ = with_constants()

    def replaces(gm):
        (node, _) = gm.graph.find_nodes(op="get_attr")
        gm.register_buffer("other", 2 * getattr(gm, node.target))
        node.target = "other"
        gm.recompile()
        return gm

    done = apply_graph_passes(gm, None, [replaces])
    x = torch.ones(2)
    assert gm(x).tolist() == [6.0, 12.0]
    assert done(x).tolist() == [9.0, 20.0]


@pytest.mark.parametrize(
    "constant",
    [
        torch.tensor(1.5),
        torch.ones(0),
        torch.ones(3, 2).t(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.tensor([float("nan")]),
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
    ],
    ids=str,
)
def test_a_constant_of_any_kind_may_stand_in_a_graph(constant):
    gm, names = with_constants()
    setattr(gm, names[0], constant)

    def nothing(gm):
        return gm

    apply_graph_passes(gm, None, [nothing])
