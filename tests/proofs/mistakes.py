"""Every mistake that this repository plants and that changes values, as a pair of programs.

A ``Case`` is a mistake, or the right program beside it, with the kind of equal that a proof must
find. Mistakes are those of other tests, imported from there.
"""

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

import pytest_gtrainer
from fixtures.models.chunked_loss import chunked_ce_step
from fixtures.models.context_parallel import gathered_attention, ulysses_attention
from fixtures.training import Parallelism, deepseek_v3_training, llama3_training
from pytest_gtrainer import (
    canonicalize_graph_pass,
    data_parallel,
    eliminate_dead_code_pass,
    graphtext,
    meaning,
    prove,
    split_stage_graph,
    trace_stage,
    trace_step,
)
from pytest_gtrainer import joint_transformer_block_bucketing_reordering_pass as joint_pass
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.arithmetic.terms import Terms
from pytest_gtrainer.passes.graph_pass import as_pass
from pytest_gtrainer.proofs import programs
from pytest_gtrainer.proofs.anyorder import AnyOrder
from pytest_gtrainer.proofs.inputs import draw_inputs
from pytest_gtrainer.proofs.programs import FunctionProgram, GraphProgram, Observed, Program
from pytest_gtrainer.proofs.proof import Proof
from pytest_gtrainer.proofs.prove import prove_programs
from pytest_gtrainer.references.config import new_model
from pytest_gtrainer.references.graph import GraphRun, rewrite, shard_traceably
from pytest_gtrainer.references.simulated import mesh_of
from pytest_gtrainer.testing.pass_file import read_pass_file
from pytest_gtrainer.worlds.fake import make_mesh, net_of, simulated_world
from pytest_gtrainer.worlds.simulated.threads.run import run_threads
from pytest_gtrainer.worlds.spec import World, make_spec
from tests.compiling.test_passes_of_inductor import Fuse
from tests.compiling.test_passes_of_inductor import traced as traced_for_inductor
from tests.compiling.test_recorder import Rescale
from tests.numerics.test_bisect import copy_pass, reassociate_pass, traced_net
from tests.numerics.test_planted_faults import Dropping
from tests.parity import test_against_the_unsharded_model as unsharded
from tests.parity import test_three_mistakes as three
from tests.parity import test_twenty_mistakes as twenty
from tests.passes import test_buckets_of_another_tracer as tracer
from tests.passes import test_mutants as mutants
from tests.passes.conftest import PLAN, Net, token_step
from tests.proofs import test_worlds as planted
from tests.proofs.test_claims import inputs_of, traced

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten
Pair = tuple[Any, Any, Any]
"""The program with the mistake, the right one, and their inputs: in a world, of each rank."""


@dataclass(frozen=True)
class Case:
    """A pair of programs, and the kind of equal that a proof must find.

    Attributes:
        of: where the mistake comes from.
        make: returns the pair, for the mesh of a world. Programs of ``on_threads`` are functions of
            a rank's mesh, of what makes a module's parameters abstract, and of the inputs.
        mesh: of the world in which it is proven, on two nodes; empty without a world.
        few: of the smallest world that shows it.
        is_right: it is no mistake, but the right program beside some.
        seconds: about how long the proof takes.
        around: makes a context for making and proving.
    """

    of: str
    name: str
    kind: str
    make: Callable[[Any], Pair]
    mesh: Mapping[str, int] = field(default_factory=dict)
    few: Mapping[str, int] = field(default_factory=dict)
    is_right: bool = False
    on_threads: bool = False
    seconds: float = 0.5
    around: Callable[[], Any] = contextlib.nullcontext

    def __str__(self) -> str:
        return f"{self.of}: {self.name}".replace(" ", "-")


@contextlib.contextmanager
def entered(mesh: Mapping[str, int], nodes: int) -> Iterator[World | None]:
    """Enter a simulated world with this mesh; without a mesh there is no world."""
    if not mesh:
        yield None
        return
    size = 1
    for extent in mesh.values():
        size *= extent
    with simulated_world(
        make_spec("simulated", mesh=dict(mesh), nodes=nodes if size % nodes == 0 else 1)
    ) as world:
        yield world


def prove_case(case: Case) -> Proof:
    with entered(case.mesh, nodes=2) as world, case.around():
        mesh = None if world is None else make_mesh(world)
        actual, expected, inputs = case.make(mesh)
        if case.on_threads:
            return prove_programs([OnThreads(each, inputs, world) for each in (actual, expected)])
        return prove(actual, expected, inputs=inputs, world=world)


def numbers_of(case: Case, patch: pytest.MonkeyPatch) -> list[dict[Any, torch.Tensor]]:
    """Return the results of both programs in plain numbers, in the smallest world."""
    # Where nothing is abstract, a run is that of the real numbers.
    patch.setattr(programs, "make_abstract", lambda *args: None)
    found = []
    with entered(case.few, nodes=1) as world, case.around():
        mesh = None if world is None else make_mesh(world)
        actual, expected, inputs = case.make(mesh)
        for each in (actual, expected):
            if case.on_threads:
                program: Program = OnThreads(each, inputs, world)
            elif isinstance(getattr(each, "gm", each), fx.GraphModule):
                program = GraphProgram(getattr(each, "gm", each), inputs, world, by_place=False)
            else:
                program = FunctionProgram(each, inputs)
            program.run(Terms(strict=True))
            found.append({key: tensor.detach().clone() for key, tensor in program.last.items()})
    return found


class OnThreads(Program):
    """A function on all ranks of a world, which are threads."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any], world: Any) -> None:
        self.function, self.inputs = function, inputs
        self.net, self.extents = net_of(world), world.mesh

    def _run(self, mode: ArithmeticMode, observed: Observed) -> None:
        given = [each.clone() for each in self.inputs]
        for place, each in enumerate(given):
            programs.make_abstract(mode, each, place)

        def prepare(module: nn.Module) -> None:
            for name, parameter in module.named_parameters():
                programs.make_abstract(mode, parameter, name)

        def on_rank(rank: int) -> Any:
            made = self.function(mesh_of(self.extents), prepare, *given)
            named = made if isinstance(made, dict) else {"output": made}
            # A copy waits for a collective.
            return {name: each.detach().clone() for name, each in named.items()}

        net = AnyOrder.of(self.net) if isinstance(mode.arithmetic, Field) else self.net
        made = run_threads(net.size, on_rank, net=net, under=mode.on_another_thread)
        for rank, found in enumerate(made):
            observed.outputs |= {(name, rank): each for name, each in found.items()}


def spoiled(right: fx.GraphModule, plant: Callable[..., Any], *given: Any) -> fx.GraphModule:
    """Return a copy with a mistake, which ``plant(gm, ...)`` makes."""
    gm = copy.deepcopy(right)
    made = plant(gm, *given)
    gm = made if isinstance(made, fx.GraphModule) else gm
    gm.recompile()
    return gm


# --- twenty mistakes

SAME, OTHER = "identical", "another function"
BESIDE_TENSOR = dict.fromkeys(twenty.BESIDE_TENSOR, OTHER) | {
    twenty.gradients_added_in_bf16: "rounds elsewhere",
    twenty.gradient_cast_on_the_other_side_of_the_tensor_reduction: "rounds elsewhere",
    twenty.parameters_gathered_in_another_dtype: "rounds elsewhere",
}
OF_REPLICAS = dict.fromkeys(twenty.OF_REPLICAS, OTHER) | {
    twenty.replicas_added_in_bf16: "rounds elsewhere"
}


def beside_tensor(plant: Any, mesh: DeviceMesh) -> Pair:
    run = GraphRun(twenty.beside_tensor_parallelism(mesh))
    right = run.traced.gm
    inputs = inputs_of(right, mesh.size(), 64)
    if plant is None:
        return right, run._as_traced.gm, inputs
    return spoiled(right, plant, mesh), right, inputs


def of_replicas(plant: Any, mesh: DeviceMesh) -> Pair:
    _, as_traced = twenty.trace_replicas(mesh, torch.zeros(2, 4, dtype=torch.bfloat16))
    right = twenty.scattered_first(as_traced).gm
    inputs = inputs_of(right, mesh.size())
    if plant is None:
        return right, as_traced.gm, inputs
    return spoiled(right, plant, mesh), right, inputs


def own_part(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return x.chunk(mesh.size(), 2)[mesh.get_local_rank()].contiguous()


def of_contexts(attend: Any, mesh: DeviceMesh) -> Pair:
    """Attention on parts of a sequence, against the same part of attention on the whole."""

    def in_parts(own: DeviceMesh, _: Any, *qkv: torch.Tensor) -> torch.Tensor:
        return attend(own, *(own_part(each, own) for each in qkv))

    def whole(own: DeviceMesh, _: Any, *qkv: torch.Tensor) -> torch.Tensor:
        return own_part(F.scaled_dot_product_attention(*qkv, is_causal=True), own)

    generator = torch.Generator().manual_seed(0)
    return in_parts, whole, list(torch.randn(3, 1, 4, 8, 16, generator=generator))


def of_stages(mistake: dict[str, Any], _: Any) -> Pair:
    """Parts of a stage's backward on microbatches, against autograd."""
    stage = twenty.stage()
    x = torch.zeros(2, 4, requires_grad=True)
    graphs = split_stage_graph(trace_stage(stage, (x,)).gm)

    def by_parts(module: nn.Module, *given: Any) -> Any:
        return twenty.run_microbatches(graphs, module, given, **mistake)

    def by_autograd(module: nn.Module, *given: Any) -> Any:
        for x, tangent in given:
            module(x).backward(tangent)
        made = [parameter.grad for parameter in module.parameters()]
        module.zero_grad()
        return made

    generator = torch.Generator().manual_seed(0)
    given = [tuple(torch.randn(2, 2, 4, generator=generator)) for _ in range(3)]
    return by_parts, by_autograd, (stage, *given)


DATA_AND_TENSOR, REPLICAS = {"dp": 2, "tp": 2}, {"replicate": 2, "shard": 2}
CONTEXTS = {
    gathered_attention: (True, "reordered"),
    ulysses_attention: (True, "other kernels"),
    **dict.fromkeys(twenty.OF_CONTEXTS, (False, OTHER)),
}
ORDER = {"another order of adding": "reordered"}
TWENTY = [
    Case(
        "twenty",
        "beside tensor, right",
        SAME,
        partial(beside_tensor, None),
        DATA_AND_TENSOR,
        DATA_AND_TENSOR,
        True,
        seconds=2,
    ),
    *(
        Case(
            "twenty",
            plant.__name__,
            kind,
            partial(beside_tensor, plant),
            DATA_AND_TENSOR,
            DATA_AND_TENSOR,
            seconds=7,
        )
        for plant, kind in BESIDE_TENSOR.items()
    ),
    Case(
        "twenty",
        "replicas, right",
        "reordered",
        partial(of_replicas, None),
        REPLICAS,
        REPLICAS,
        True,
        seconds=2,
    ),
    *(
        Case(
            "twenty",
            plant.__name__,
            kind,
            partial(of_replicas, plant),
            REPLICAS,
            REPLICAS,
            seconds=2 if place else 0.5,
        )
        for place, (plant, kind) in enumerate(OF_REPLICAS.items())
    ),
    *(
        Case(
            "twenty",
            attend.__name__,
            kind,
            partial(of_contexts, attend),
            {"cp": 2},
            {"cp": 2},
            is_right,
            True,
        )
        for attend, (is_right, kind) in CONTEXTS.items()
    ),
    Case("twenty", "stages, right", SAME, partial(of_stages, {}), is_right=True),
    *(
        Case("twenty", name, ORDER.get(name, OTHER), partial(of_stages, mistake))
        for name, mistake in twenty.OF_STAGES.items()
    ),
]


# --- three mistakes, and those of tests/proofs/test_worlds.py


def of_experts(plant: Any, mesh: DeviceMesh) -> Pair:
    config = deepseek_v3_training(
        mesh, "fp32", "debug_small", parallel=Parallelism({}), steps=1, trace_once=False
    )
    run = GraphRun(config)
    right = run.traced.gm
    inputs = inputs_of(right, mesh.size(), 64)
    if plant is None:
        return right, run._as_traced.gm, inputs
    return spoiled(right, plant), right, inputs


def of_a_bucketed_graph(plant: Any, mesh: DeviceMesh) -> Pair:
    step = planted.traced_on(mesh)
    right = planted.bucketed(step)
    inputs = inputs_of(right, mesh.size(), 12)
    if plant is None:
        return right, step, inputs
    return spoiled(right, plant), right, inputs


EIGHT, FOUR, TWO = {"efsdp": 2, "ep": 2, "tp": 2}, {"fsdp": 4}, {"fsdp": 2}
THREE = [
    Case(
        "three",
        "experts, right",
        "reordered",
        partial(of_experts, None),
        EIGHT,
        EIGHT,
        True,
        seconds=60,
    ),
    *(
        Case("three", plant.__name__, kind, partial(of_experts, plant), EIGHT, EIGHT, seconds=60)
        for plant, kind in zip(three.MISTAKES, (OTHER, OTHER, "rounds elsewhere"), strict=True)
    ),
]
PLANTED = [
    Case(
        "worlds",
        "bucketed, right",
        "reordered",
        partial(of_a_bucketed_graph, None),
        FOUR,
        TWO,
        True,
    ),
    *(
        Case(
            "worlds",
            plant.__name__,
            kind,
            partial(of_a_bucketed_graph, plant),
            FOUR,
            TWO,
            seconds=2,
        )
        for plant, kind in planted.PLANTED.items()
    ),
]


# --- mutants of passes


def of_a_pass_file(words: str, is_planted: bool, mesh: Any) -> Pair:
    """A pass file's graph behind a mutant, against what the right passes make of it.

    Right passes, and mutants of what they refuse, against the graph as it was.
    """
    file = read_pass_file(ROOT / "fixtures" / "graphs" / mutants.MUTANTS[words].killed_by)
    before = graphtext.parse(file.text)
    inputs = [draw_inputs(before, seed=rank) for rank in range(mesh.size() if mesh else 1)]

    def behind_passes() -> fx.GraphModule:
        gm = graphtext.parse(file.text)
        for call in file.passes:
            gm = as_pass(getattr(pytest_gtrainer, call.name))(gm, inputs[0], **call.options)
        gm.recompile()
        return gm

    expected = behind_passes() if is_planted and file.raises is None else before
    with pytest.MonkeyPatch.context() as patch:
        if is_planted:
            mutants.MUTANTS[words].plant(patch)
        return behind_passes(), expected, inputs if mesh else inputs[0]


def of_bucketing(words: str, mesh: DeviceMesh) -> Pair:
    step = trace_step(data_parallel(Net(1, 32), mesh), token_step, (torch.zeros(2, 3).long(),))
    gm = canonicalize_graph_pass(step.gm)
    plan = [PLAN[0], PLAN[1], PLAN[-1]]
    right = joint_pass(copy.deepcopy(gm), bucket_plan=plan)
    inputs = inputs_of(right, mesh.size(), 16)
    if not words:
        return right, gm, inputs
    with pytest.MonkeyPatch.context() as patch:
        mutants.MUTANTS[words].plant(patch)
        return joint_pass(copy.deepcopy(gm), bucket_plan=plan), right, inputs


def of_small_passes(words: str, a_pass: Any, function: Any, is_planted: bool, _: Any) -> Pair:
    """A mutant whose file has operators that cannot run, or whose numbers are read as bytes."""
    gm = make_fx(function, tracing_mode="fake")(torch.ones(2, 3), torch.ones(2, 3))
    before = copy.deepcopy(gm)
    with pytest.MonkeyPatch.context() as patch:
        if is_planted:
            mutants.MUTANTS[words].plant(patch)
        gm = a_pass(gm)
    gm.recompile()
    return gm, before, tuple(torch.randn(2, 2, 3).unbind())


def changes_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.view(3, 2).t() * 2 + y.sum()


def has_effects(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    torch.rand(2)
    return y * torch.rand(2, 3)


def mesh_of_file(words: str) -> dict[str, int]:
    file = read_pass_file(ROOT / "fixtures" / "graphs" / mutants.MUTANTS[words].killed_by)
    return {} if file.world is None else dict(file.world.mesh)


OF_FILES = {
    "forward and backward in one bucket": SAME,
    "a prefetch across the boundary of forward and backward": SAME,
    "an all-gather in the wrong group": OTHER,
    "every all-gather of a group moves": SAME,
    "a collective crosses a write": OTHER,
    "a draw crosses another one": OTHER,
    "replicas reduce the whole gradient first": "reordered",
    "a duplicate of another dtype is dropped": OTHER,
    "random numbers are drawn again": OTHER,
}
REFUSED = (
    "a collective crosses a write",
    "a draw crosses another one",
    "random numbers are drawn again",
)
OF_BUCKETING = {
    "members in execution order": "reordered",
    "members of one module in another order than registered": SAME,
    "a dropped parameter": "reordered",
    "new nodes of the backward are not marked": SAME,
    "the next all-gather is launched behind the wait": SAME,
    "a reduce-scatter is waited for at once": SAME,
    "the backward's first all-gather where its parameter is read": SAME,
}
SMALL = {
    "a view of another shape is an identity": (canonicalize_graph_pass, changes_shape),
    "what nobody reads has no effect": (eliminate_dead_code_pass, has_effects),
}
NO_VALUES = {
    "a wait placed after its use": "the graph does not run",
    "gathered members leave as strided views": "the graph does not run",
    "a parameter in no bucket is not reported": "the pass fails",
    'the final bucket without "loss"': "the pass refuses the plan",
    'the final bucket always with "loss"': "a plan, whose buckets are the same",
    "all-gathers stay in their group": "the graph stays as it was",
    "ranks that pad do not prefetch": "an order of launches",
    "a tie is not reported": "nothing is refused, and the graph is right",
    "recomputed nodes share the metadata of the first": "metadata",
}
"""Mutants that change no value, and why."""

MUTANTS = [
    *(
        Case(
            "mutants",
            f"{words}, right",
            "reordered" if "replicas" in words else SAME,
            partial(of_a_pass_file, words, False),
            mesh_of_file(words),
            mesh_of_file(words),
            is_right=True,
        )
        for words in OF_FILES
        if words not in REFUSED
    ),
    *(
        Case(
            "mutants",
            words,
            kind,
            partial(of_a_pass_file, words, True),
            mesh_of_file(words),
            mesh_of_file(words),
        )
        for words, kind in OF_FILES.items()
    ),
    Case(
        "mutants",
        "bucketing, right",
        "reordered",
        partial(of_bucketing, ""),
        FOUR,
        TWO,
        True,
        seconds=4,
    ),
    *(
        Case("mutants", words, kind, partial(of_bucketing, words), FOUR, TWO, seconds=2)
        for words, kind in OF_BUCKETING.items()
    ),
    *(
        Case(
            "mutants",
            words if is_planted else f"{words}, right",
            OTHER if is_planted else SAME,
            partial(of_small_passes, words, a_pass, function, is_planted),
            is_right=not is_planted,
        )
        for words, (a_pass, function) in SMALL.items()
        for is_planted in (False, True)
    ),
]


# --- bugs on record


def other_order(training: Any, flavor: str, mesh: DeviceMesh) -> Pair:
    """Payloads in the order of execution (pull request 3590)."""
    config = training(mesh, "fp32", flavor, trace_once=False)
    step = traced(config)
    right = rewrite(step, config).gm
    wrong = rewrite(step, config, payload_order="execution").gm
    return wrong, right, inputs_of(right, mesh.size(), 64)


def head_apart(mesh: DeviceMesh) -> Pair:
    """A last bucket that lacks the head, which is read inside the loss (pull request 3770)."""

    def chunked(*last: Any) -> fx.GraphModule:
        plan = ["tok_embeddings", "layers.0", "layers.1", *last]
        loss = chunked_ce_step(4)
        config = llama3_training(mesh, "fp32", step=loss, bucket_plan=plan, trace_once=False)
        return rewrite(traced(config), config).gm

    right = chunked(["norm", "lm_head", "loss"])
    return chunked("norm", ["lm_head", "loss"]), right, inputs_of(right, mesh.size(), 64)


def of_another_tracer(mesh: DeviceMesh) -> Pair:
    """Buckets that torch packs, in the order of execution."""
    config = llama3_training(mesh, "bf16_fp32", trace_once=False)
    model = shard_traceably(new_model(config), config)
    gm = tracer.traced(model, config.step, config.inputs(0))
    right = tracer.bucketed(copy.deepcopy(gm), model, config.bucket_plan, tracer.registered(model))
    by_place = tracer.bucketed(gm, model, config.bucket_plan, lambda member: member.launch)
    inputs = [draw_inputs(right, seed=rank) for rank in range(mesh.size())]
    return by_place, right, inputs


def example(folder: str, module: str) -> Any:
    """Return a module of an example, which is a project of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples" / folder)
        return importlib.import_module(module)


def divided(first: bool, mesh: DeviceMesh) -> Pair:
    """``examples/downstream``: averages as sums and a division; its bug divides what goes in."""
    acme = example("downstream", "acme.model")
    tokens = torch.zeros(2, 2, 7, dtype=torch.int64).unbind()
    step = trace_step(data_parallel(acme.Model(), mesh), acme.step, tokens)
    replaced = example("downstream", "acme.passes").sum_and_divide_pass
    wrong = replaced(copy.deepcopy(step.gm), divide_first=first)
    return wrong, step.gm, inputs_of(step.gm, mesh.size(), 48)


@contextlib.contextmanager
def fused(with_bug: bool) -> Iterator[None]:
    """``examples/fusion``: a kernel; with its bug it takes ten times eps."""
    fusion, model = example("fusion", "serve.fusion"), example("fusion", "serve.model")

    def kernel(x: Any, weight: Any, scale: Any, eps: float) -> Any:
        return model.static_quant(model.rms_norm(x, weight, eps * 10 if with_bug else eps), scale)

    with pytest.MonkeyPatch.context() as patch, meaning("serve::rms_norm_static_quant", kernel):
        patch.setattr(fusion, "WITH_BUG", with_bug)
        yield


def fusion(_: Any) -> Pair:
    fusion, model = example("fusion", "serve.fusion"), example("fusion", "serve.model")

    def norm(x: Any, weight: Any, scale: Any) -> Any:
        return model.static_quant(model.rms_norm(x, weight, model.EPS), scale)

    x, weight = torch.randn(6, 8).bfloat16(), torch.ones(8).bfloat16()
    x[1::4] *= 1e-3  # else eps is rounded away
    inputs = x, weight, torch.tensor(0.02)
    before = make_fx(norm, select_decomp_table(), tracing_mode="fake")(*inputs)
    gm = copy.deepcopy(before)
    fusion.FuseNormAndQuant()(gm.graph)
    gm.recompile()
    assert "rms_norm_static_quant" in gm.code
    return gm, before, inputs


def merged(bug: str, function: Any, _: Any) -> Pair:
    """``examples/subexpressions``: equal nodes become one."""
    passes = example("subexpressions", "train.passes")
    before = make_fx(function)(torch.ones(3), torch.ones(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "BUG", bug)
        wrong = passes.merge_equal(copy.deepcopy(before))
    return wrong, before, tuple(torch.randn(2, 3).unbind())


def written_between(x: torch.Tensor, y: torch.Tensor) -> Any:
    before = x * 2
    x.view(-1).add_(y)
    return before, x * 2


def two_buffers(x: torch.Tensor, y: torch.Tensor) -> Any:
    first, second = torch.empty_like(x), torch.empty_like(x)
    first.copy_(x * 2)
    second.copy_(y * 2)
    return first, second


def reassociated(a_pass: Any, _: Any) -> Pair:
    step = traced_net()
    inputs = inputs_of(step.gm, 1)[0]
    return a_pass(copy.deepcopy(step.gm), ()), step.gm, inputs


def in_inductor(a_pass: Any, _: Any) -> Pair:
    step = traced_for_inductor()[-1]
    gm = copy.deepcopy(step.gm)
    a_pass(gm.graph)
    gm.recompile()
    return gm, step.gm, inputs_of(step.gm, 1)[0]


def of_scaled_twice() -> Any:
    return meaning("gtrainer_tests::scaled_twice", lambda x, by: x * 0.5 * by)


def restored(is_restored: bool, _: Any) -> Pair:
    """Random numbers that a checkpoint draws again, or others."""

    def run(preserve: bool) -> Any:
        def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            model.preserve = preserve
            loss = model(x).sum()
            loss.backward()
            return loss.detach()

        return step

    torch.manual_seed(0)
    return run(is_restored), run(True), (Dropping(True), torch.randn(3, 4))


def perceptron(placement: Any, _: Any) -> Pair:
    """A perceptron over two ranks of a model, against the whole."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=placement)}

    def parallel(mesh: DeviceMesh, prepare: Any, x: Any, c: Any) -> Any:
        model = unsharded.Mlp()
        prepare(model)
        return unsharded.trained(parallelize_module(model, mesh, plan), x, c)

    def whole(mesh: DeviceMesh, prepare: Any, x: Any, c: Any) -> Any:
        model = unsharded.Mlp()
        prepare(model)
        return unsharded.trained(model, x, c)

    shape = unsharded.TOKENS, unsharded.WIDTH
    return parallel, whole, [torch.randn(shape), torch.randn(shape)]


def unsharded_deepseek(tensor: Any, mistake: Any, _: Any) -> Pair:
    """Gradients of DeepSeek-V3 over two ranks of a model, against the whole."""

    def parallel(mesh: DeviceMesh, prepare: Any) -> Any:
        return unsharded.gradients_of(tensor, mesh, mistake, prepare)

    def whole(mesh: DeviceMesh, prepare: Any) -> Any:
        return unsharded.gradients_of(None, prepare=prepare)

    return parallel, whole, []


def nothing(model: nn.Module) -> None:
    """Make no mistake."""


TP = {"tp": 2}
THREE_RANKS = {"fsdp": 3}
SEQUENCE, EXPERTS = {"sequence": True}, {"experts": True}
RECORD = [
    Case(
        "record",
        "order of payloads, llama3",
        "reordered",
        partial(other_order, llama3_training, "debug"),
        FOUR,
        TWO,
        seconds=20,
    ),
    Case(
        "record",
        "order of payloads, deepseek_v3",
        "reordered",
        partial(other_order, deepseek_v3_training, "debug_small"),
        FOUR,
        TWO,
        seconds=60,
    ),
    Case("record", "head apart from its bucket", "reordered", head_apart, FOUR, TWO, seconds=20),
    Case(
        "record", "order of another tracer", "reordered", of_another_tracer, FOUR, TWO, seconds=20
    ),
    Case(
        "record",
        "sums, then divided",
        "reordered",
        partial(divided, False),
        THREE_RANKS,
        TWO,
        True,
        seconds=6,
    ),
    Case(
        "record",
        "divided, then summed",
        "reordered",
        partial(divided, True),
        THREE_RANKS,
        TWO,
        seconds=6,
    ),
    Case(
        "record", "fused norm", "other kernels", fusion, is_right=True, around=partial(fused, False)
    ),
    Case("record", "eps of a fused norm", OTHER, fusion, around=partial(fused, True)),
    *(
        Case(
            "record",
            f"{function.__name__}, merged" if bug else f"{function.__name__}, right",
            OTHER if bug else SAME,
            partial(merged, bug, function),
            is_right=not bug,
        )
        for bugs, function in ((("", "writes"), written_between), (("", "buffers"), two_buffers))
        for bug in bugs
    ),
    Case("record", "a copy", SAME, partial(reassociated, copy_pass), is_right=True),
    Case(
        "record", "an addition reassociated", "reordered", partial(reassociated, reassociate_pass)
    ),
    Case(
        "record",
        "times two, divided",
        "reordered",
        partial(in_inductor, Rescale(2.0)),
        is_right=True,
    ),
    Case("record", "times three, divided", "reordered", partial(in_inductor, Rescale(3.0))),
    Case(
        "record",
        "a fused product",
        SAME,
        partial(in_inductor, Fuse()),
        is_right=True,
        around=of_scaled_twice,
    ),
    Case(
        "record",
        "a fused product of another factor",
        OTHER,
        partial(in_inductor, Fuse(4.5)),
        around=of_scaled_twice,
    ),
    Case("record", "random numbers restored", SAME, partial(restored, True), is_right=True),
    Case("record", "random numbers not restored", OTHER, partial(restored, False)),
    Case(
        "unsharded",
        "a perceptron",
        "reordered",
        partial(perceptron, Replicate()),
        TP,
        TP,
        is_right=True,
        on_threads=True,
        seconds=3,
    ),
    Case(
        "unsharded",
        "partial sums of a perceptron",
        OTHER,
        partial(perceptron, Partial()),
        TP,
        TP,
        on_threads=True,
    ),
    *(
        Case(
            "unsharded",
            mistake.__name__ if mistake is not nothing else f"deepseek_v3 {tensor}",
            {"sequence": "rounds elsewhere", "experts": "reordered"}[next(iter(tensor))]
            if mistake is nothing
            else OTHER,
            partial(unsharded_deepseek, tensor, mistake),
            TP,
            TP,
            is_right=mistake is nothing,
            on_threads=True,
            seconds=60,
        )
        for tensor, mistake in (
            (SEQUENCE, nothing),
            (SEQUENCE, unsharded.without_the_sum_over_heads),
            (EXPERTS, nothing),
            (EXPERTS, unsharded.without_the_sum_over_parts_of_experts),
        )
    ),
]

CASES = TWENTY + THREE + MUTANTS + RECORD
