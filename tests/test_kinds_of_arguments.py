"""Arguments of another type than is asked for are refused in one sentence that names them."""

import re

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    BitwiseDifference,
    ChunkConfig,
    CompileRecord,
    CostModel,
    DebugConfig,
    Record,
    assert_bitwise_equal,
    assert_invariant,
    assert_no_deadlock,
    assert_no_less_accurate,
    assert_rank_agnostic,
    assert_resumes,
    assert_run_to_run,
    assert_runs_equal,
    bucket_layout,
    chunk_pass,
    compare_operators,
    data_parallel,
    deterministic,
    digest,
    field_arithmetic,
    flex_attention_options,
    graphtext,
    meaning,
    mesh_seed,
    peak_memory,
    prove,
    record_training,
    trace_step,
)
from pytest_gtrainer.conformance import Adapter
from pytest_gtrainer.numerics.bits import NoBytes

X = torch.ones(4, 2)
CHUNKS = ChunkConfig("layers.*")
LOSS = torch.tensor(1.0)
MODEL = nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters(), 0.1)
NESTED = [
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
]


def entered(context):
    with context:
        pass


def recorded(function):
    assert_runs_equal(lambda run: function(run), lambda run: function(run), control=function)


def in_field(function):
    with field_arithmetic() as elements:
        function(elements)


def training(folder, model=MODEL, optimizer=SGD, **options):
    entered(record_training(model, optimizer, folder / "record", **options))


def traced(model=MODEL, step=lambda model, x: model(x).sum(), **options):
    trace_step(model, step, (X,), **options)


def none(*_):
    return None


def endless():
    graph = fx.Graph()
    gm = fx.GraphModule({}, graph_ended(graph))
    gm.graph.erase_node(gm.graph.output_node())
    return gm


def graph_ended(graph):
    rows = graph.placeholder("rows")
    rows.meta["val"] = X
    graph.output(rows)
    return graph


WRONG = {
    "run.step loss": (
        lambda _: recorded(lambda run: run.step(1.0, MODEL)),
        "loss 'loss' of a record is 1.0: give a tensor",
    ),
    "run.step model": (
        lambda _: recorded(lambda run: run.step(LOSS, [MODEL])),
        "the model of run.step() is [Linear",
    ),
    "run.step optimiser": (
        lambda _: recorded(lambda run: run.step(LOSS, MODEL, [SGD])),
        "the optimiser of run.step() is a list without a state: give one",
    ),
    "run.add tensor": (lambda _: recorded(lambda run: run.add("loss", "x", 3)), "is 3: give a te"),
    "run.add name": (
        lambda _: recorded(lambda run: run.add("loss", 3, LOSS)),
        "the name of a recorded tensor is 3: give a text",
    ),
    "run.gradients": (
        lambda _: recorded(lambda run: run.gradients(None)),
        "the model of run.gradients() is None: give an nn.Module",
    ),
    "run.start": (lambda _: recorded(lambda run: run.start([])), "of run.start() is []: give an"),
    "run.input": (
        lambda _: recorded(lambda run: run.input("x", 3)),
        "input 'x' of run.input() is 3: give a tensor",
    ),
    "Record.add": (lambda _: Record().add(0, 0, "loss", "x", None), "'x' of a record is None"),
    "config": (lambda _: entered(deterministic(config=3)), "config is 3: give a DebugConfig"),
    "options": (lambda _: flex_attention_options(None), "config is None: give a DebugConfig"),
    "seed": (lambda _: entered(deterministic(seed=1.5)), "the seed is 1.5: give a whole number"),
    "seed of a config": (
        lambda _: entered(deterministic(DebugConfig(seed="a"))),
        "the seed is 'a': give a whole number",
    ),
    "seed of a mesh": (lambda _: mesh_seed("a", None), "the seed is 'a': give a whole number"),
    "rate": (lambda _: CostModel("1"), "a cost model's flops_per_second is '1': give a number"),
    "overhead": (lambda _: CostModel(overhead=None), "model's overhead is None: give a number"),
    "latency": (lambda _: CostModel(latency=True), "model's latency is True: give a number"),
    "abstract": (
        lambda _: in_field(lambda elements: elements.make_abstract([X], "x")),
        "what is made abstract is [tensor",
    ),
    "elements": (lambda _: in_field(lambda elements: elements.of(3)), "has elements is 3: give"),
    "recorded model": (lambda at: training(at, [MODEL]), "model is [Linear"),
    "optimiser": (lambda at: training(at, optimizer={"a": SGD}), "optimizer is {'a': SGD"),
    "optimisers": (lambda at: training(at, optimizer=[SGD, 3]), "optimizer is 3: give a torch"),
    "beside": (lambda at: training(at, beside=[MODEL]), "beside is [Linear"),
    "module beside": (lambda at: training(at, beside={"a": 3}), "beside['a'] is 3: give an nn."),
    "activations": (lambda at: training(at, activations=3), "activations is 3: give patterns"),
    "at": (lambda _: assert_resumes(none, none, none, at="3", steps=4), "at is '3': give a whole"),
    "steps": (lambda _: assert_resumes(none, none, none, at=1, steps=2.5), "steps is 2.5: give a"),
    "make": (lambda _: assert_resumes(3, none, none, at=1, steps=2), "make is 3: give a function"),
    "save": (lambda _: assert_resumes(none, "", none, at=1, steps=2), "save is '': give a func"),
    "over": (lambda _: assert_invariant(none, X, over=[1, 2]), "over is [1, 2]: give sizes by"),
    "sizes": (lambda _: assert_invariant(none, X, over={"batch": 3}), "over['batch'] is 3: give"),
    "rows": (lambda _: assert_invariant(None, X, over={"batch": [1, 2]}), "fn is None: give a fu"),
    "communications": (
        lambda _: assert_no_deadlock({}, communications=["x"]),
        "communications= is ['x']: give a mapping",
    ),
    "groups": (lambda _: assert_no_deadlock({}, groups=["x"]), "groups= is ['x']: give a mapping"),
    "places": (lambda _: traced(dynamic_dims=[0]), "dynamic_dims is [0]: give places by name"),
    "place": (lambda _: traced(dynamic_dims={"b": [0]}), "dynamic_dims['b'] is 0: give (input"),
    "traced model": (lambda _: traced(None), "model is None: give an nn.Module"),
    "traced step": (lambda _: traced(step=3), "step is 3: give a function"),
    "sizes of a graph": (
        lambda _: peak_memory(make_fx(torch.relu)(X), sizes=[3]),
        "sizes is [3]: give sizes by name",
    ),
    "operators": (lambda _: compare_operators(none, none), "actual is <function non"),
    "compiled": (lambda _: assert_no_less_accurate(3, none, X), "compiled is 3: give a function"),
    "eager": (lambda _: assert_no_less_accurate(none, 3, X), "eager is 3: give a function"),
    "repeated": (lambda _: assert_run_to_run(3), "function is 3: give a function"),
    "place of a graph": (lambda _: CompileRecord()["0"], "place of a compiled graph is '0': give"),
    "places of graphs": (lambda _: CompileRecord()[0:1], "compiled graph is slice(0, 1, None): g"),
    "changed": (lambda _: CompileRecord().passes(changed="no"), "changed is 'no': give True or F"),
    "changed pass": (lambda _: CompileRecord().only_pass("x", changed=1), "changed is 1: give"),
    "graphs": (lambda _: CompileRecord().assert_compiles("1"), "graphs is '1': give a whole"),
    "recompiles": (lambda _: CompileRecord().assert_compiles(1, None), "recompiles is None: give"),
    "chunked graph": (lambda _: chunk_pass(None, config=CHUNKS), "gm is None: give a GraphModule"),
    "chunks": (
        lambda _: chunk_pass(endless(), config="l.*"),
        "config is 'l.*': give a ChunkConfig",
    ),
    "twin": (lambda _: chunk_pass(endless(), config=CHUNKS, twin=X), "twin is tensor("),
    "call": (lambda _: Adapter(none, call=3), "call is 3: give a function"),
    "strict": (lambda _: Adapter(none, strict="no"), "strict is 'no': give True or False"),
    "options of a pass": (lambda _: Adapter(none, options=[1]), "options is [1]: give values by"),
    "not claimed": (lambda _: Adapter(none, not_claimed=["E6"]), "not_claimed is ['E6']: give"),
    "models": (lambda _: Adapter(none, models="my:m"), "models is 'my:m': give a list"),
    "limit": (lambda _: Adapter(none, limit="60"), "limit is '60': give a number of seconds"),
    "meaning": (lambda _: entered(meaning("aten::mul", 3)), "reference is 3: give a function"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_another_type_is_refused_by_name(name, tmp_path):
    call, says = WRONG[name]
    with pytest.raises(TypeError, match=re.escape(says)):
        call(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.gt_world("fake", size=2)
@pytest.mark.parametrize("policy", ["bf16", torch.bfloat16, {"param_dtype": torch.bfloat16}])
def test_a_precision_that_is_no_policy_is_refused(policy, gt_mesh):
    with pytest.raises(TypeError, match=r"mp_policy is .*: give a MixedPrecisionPolicy"):
        data_parallel(nn.Linear(2, 2), gt_mesh, mp_policy=policy)


@pytest.mark.parametrize(
    "places", [[(0, 9)], [(7, 0)], [], [(0, -1)], [("a", 0)], [(0, 0), (1, 0)]]
)
def test_a_place_of_a_dynamic_dimension_that_no_input_has_is_refused(places):
    with pytest.raises(ValueError, match=r"dynamic_dims\['b'\] is .*; there are 1 input"):
        traced(dynamic_dims={"b": places})


@pytest.mark.parametrize("nested", NESTED, ids=["strided", "jagged"])
def test_a_nested_tensor_has_no_bytes(nested):
    for call in (lambda: digest(nested), lambda: Record().add(0, 0, "loss", "x", nested)):
        with pytest.raises(
            Exception, match="a nested tensor has no plain bytes: compare its unbind"
        ):
            call()
    with pytest.raises(ValueError, match="has a nested tensor, whose elements nobody follows"):
        prove(torch.abs, torch.abs, inputs=({"x": nested},))


class Wrapper(torch.Tensor):
    """Wraps a tensor, and does not say so by ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [each.inner if isinstance(each, cls) else each for each in args]
        return cls(func(*args, **(kwargs or {})))


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("count", [0, 1, 8])
@pytest.mark.parametrize("kind", ["wrapper", "parameter", "masked"])
def test_a_tensor_that_wraps_another_has_no_bytes(kind, count):
    """Its own memory holds nothing, which would be equal to that of any other one."""
    makes = {
        "wrapper": Wrapper,
        "parameter": lambda inner: nn.Parameter(Wrapper(inner)),
        "masked": lambda inner: torch.masked.masked_tensor(inner, inner > 0),
    }
    ones, zeros = makes[kind](torch.ones(count)), makes[kind](torch.zeros(count))
    for call in (lambda: digest(ones), lambda: Record().add(0, 0, "loss", "x", ones)):
        with pytest.raises(NoBytes, match="wraps other tensors: compare its parts"):
            call()
    with pytest.raises(BitwiseDifference, match="wraps other tensors: compare its parts"):
        assert_bitwise_equal({"x": ones}, {"x": zeros})


USES = {
    "bucket_layout": bucket_layout,
    "render": graphtext.render,
    "assert_no_deadlock": lambda gm: assert_no_deadlock({0: gm}),
    "peak_memory": peak_memory,
    "prove": lambda gm: prove(gm, gm),
    "assert_rank_agnostic": lambda gm: assert_rank_agnostic(gm, none, lambda rank: (X,), 2),
}


@pytest.mark.parametrize("use", USES)
def test_a_graph_without_an_end_is_refused(use):
    with pytest.raises(ValueError, match=r"the graph has no output node: end it with graph.output"):
        USES[use](endless())
