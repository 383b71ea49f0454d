"""Stamped layers: a trace of four of many identical layers is the full trace, or it says why it is one."""

import collections
import copy
import gc
import random
import re
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch

from fixtures import repeated
from fixtures.models import deepseek_v3, llama3
from fixtures.models.chunked_loss import chunked_ce_step
from fixtures.models.expert_parallel import apply_expert_parallel
from fixtures.models.loss import ce_step
from fixtures.repeated import REFUSED, STAMPED, WIDTH
from fixtures.training import llama3_training, token_batches
from pytest_gtrainer import (
    ChunkConfig,
    MixedPrecisionPolicy,
    apply_graph_passes,
    assert_bitwise_different,
    assert_bitwise_equal,
    construct_default_graph_passes,
    data_parallel,
    facts,
    get_default_transformer_block_buckets,
    graphtext,
    trace_step,
    train_graph,
)
from pytest_gtrainer.graphtext import render
from pytest_gtrainer.tracing.stamping import driver, outline, signature, units
from pytest_gtrainer.tracing.stamping.runs import find_runs
from pytest_gtrainer.tracing.stamping.verdict import StampedGraphError, first_difference


def step(model, x):
    return model(x).sum()


def traced_both_ways(build, step=step):
    """The same model traced in full and stamped, after one that fills caches of torch."""
    inputs = (torch.ones(4, WIDTH),)
    torch.manual_seed(0)
    model = build()
    stamped = trace_step(model, step, inputs, repeat_layers="auto")
    random.seed(0)
    torch.manual_seed(0)
    full = trace_step(build(), step, inputs)
    return full, stamped


@pytest.mark.parametrize("name", STAMPED)
def test_what_is_proven_alike_is_stamped_and_equal_node_by_node(name):
    full, stamped = traced_both_ways(STAMPED[name])
    assert stamped.repeated.stamped, stamped.repeated.full
    assert not stamped.repeated.full
    assert first_difference(full.gm.graph, stamped.gm.graph) is None
    assert (full.parameter_fqns, full.buffer_fqns) == (stamped.parameter_fqns, stamped.buffer_fqns)
    assert full.trainable_fqns == stamped.trainable_fqns


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_is_traced_in_full_and_says_why(name):
    build, reason = REFUSED[name]
    full, stamped = traced_both_ways(build)
    assert not stamped.repeated.stamped
    reasons = [layers.reason for layers in stamped.repeated.full]
    assert any(re.search(reason, told) for told in reasons), reasons
    assert first_difference(full.gm.graph, stamped.gm.graph) is None


def decoder(build, mesh, mode="fully_shard", **options):
    with torch.device("meta"):
        model = build()
    if mode is not None:
        data_parallel(model, mesh, mode=mode, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), **options)
    return model


def llama(n_layers=7):
    return llama3.Llama3(replace(llama3.FLAVORS["debug"], n_layers=n_layers))


def deepseek():
    return deepseek_v3.DeepSeekV3(replace(deepseek_v3.FLAVORS["debug"], n_layers=10, n_dense_layers=5))


def assert_stamped(model, step, runs, **options):
    batch = token_batches(256, "cpu")(0, 0)
    full, stamped = (trace_step(model, step, batch, repeat_layers=how, **options) for how in ("off", "auto"))
    told = [(run.container, run.first, run.period, run.units) for run in stamped.repeated.stamped]
    assert told == runs, stamped.repeated.full
    assert first_difference(full.gm.graph, stamped.gm.graph) is None
    assert full.gradient_placements == stamped.gradient_placements
    assert render(full.gm) == render(stamped.gm)
    return full, stamped


def nothing(module, args, result):
    """A forward hook."""


def layer_with(factor=1.0, shift=0.0, inner=1.0, hook=nothing, change=lambda layer: None, **attributes):
    """A layer whose function has defaults and a closure of its own; ``change`` is made to the layer."""
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Dropout(0.5))
    layer.register_buffer("seen", torch.zeros(2))
    layer.scaled = lambda x, factor=factor, *, shift=shift: x * factor * inner + shift
    if hook is not None:
        layer.register_forward_hook(hook)
    for name, value in {"flags": [1, {"a": 2}], "partly": partial(max, 1), **attributes}.items():
        setattr(layer, name, value)
    change(layer)
    return layer


def weight_like(make):
    """A change to a layer: its weight is what ``make`` makes of it."""
    return lambda layer: setattr(layer[0], "weight", torch.nn.Parameter(make(layer[0].weight.detach())))


CHANGES = {
    "a default": {"factor": 2.0},
    "a default by keyword": {"shift": 1.0},
    "what a function closes over": {"inner": 2.0},
    "1 and 1.0": {"factor": 1},
    "a hook": {"hook": None},
    "what a hook does": {"hook": lambda module, args, result: 2 * result},
    "an attribute": {"more": 1},
    "an item deep inside": {"flags": [1, {"a": 3}]},
    "a key deep inside": {"flags": [1, {"b": 2}]},
    "a tuple for a list": {"flags": (1, {"a": 2})},
    "an argument of a partial": {"partly": partial(max, 2)},
    "the function of a partial": {"partly": partial(min, 1)},
    "another function": {"scaled": lambda x: x},
    "the probability of a dropout": {"change": lambda layer: setattr(layer[1], "p", 0.25)},
    "training or not": {"change": lambda layer: layer[1].eval()},
    "another class": {"change": lambda layer: setattr(layer, "1", torch.nn.AlphaDropout(0.5))},
    "a module more": {"change": lambda layer: layer.append(torch.nn.Identity())},
    "a parameter more": {"change": lambda layer: setattr(layer[0], "bias", torch.nn.Parameter(torch.ones(4)))},
    "a name of a buffer": {"change": lambda layer: (layer.register_buffer("saw", layer.seen), delattr(layer, "seen"))},
    "a shape of a buffer": {"change": lambda layer: setattr(layer, "seen", torch.zeros(3))},
    "a shape": {"change": weight_like(lambda weight: torch.ones(4, 3))},
    "strides": {"change": weight_like(lambda weight: weight.t())},
    "an offset": {"change": weight_like(lambda weight: torch.ones(20)[4:].view(4, 4))},
    "a dtype": {"change": weight_like(lambda weight: weight.double())},
    "a device": {"change": weight_like(lambda weight: weight.to("meta"))},
    "a gradient": {"change": lambda layer: layer.requires_grad_(False)},
}


def test_two_equal_layers_have_one_signature():
    """The twin of what follows; values of parameters are no part of it."""
    changed = layer_with(change=weight_like(torch.zeros_like))
    assert signature.signature(layer_with()) == signature.signature(layer_with()) == signature.signature(changed)


@pytest.mark.parametrize("what", CHANGES)
def test_a_signature_tells_what_a_trace_would_see(what):
    """R2: equal code and equal shapes are not all."""
    told = f"layers that differ in {what} have one signature: one would be stamped from the other"
    assert signature.signature(layer_with()) != signature.signature(layer_with(**CHANGES[what])), told


TWO = """
if P:
  P.layers[0].w: f32[4, 4]
  P.layers[1].w: f32[4, 4]
if fwd:
  with layers[0]:
    neg: f32[4, 4] = aten.neg(P.layers[0].w)
  with layers[1]:
    view: f32[4, 4] = aten.view(P.layers[1].w, [4, 4])
    mul: f32[4, 4] = aten.mul.Tensor(view, fwd.layers[0].neg)
if bwd:
  with layers[1]:
    add: f32[4, 4] = aten.add.Tensor(saved.layers[1].mul, 1)
if out:
  out[0] = bwd.layers[1].add
"""
SMALLER = torch.empty(2, 2, device="meta")
TAMPERED = {
    "operator": (lambda neg, view, mul, add: setattr(neg, "target", torch.ops.aten.exp.default), r"%neg.*aten\.exp"),
    "operand": (lambda neg, view, mul, add: setattr(mul, "args", mul.args[::-1]), r"%mul.*: operands"),
    "literal": (lambda neg, view, mul, add: setattr(add, "args", (mul, 2)), r"%add.*: operands"),
    "type of a literal": (lambda neg, view, mul, add: setattr(add, "args", (mul, 1.0)), r"%add.*: operands"),
    "keyword": (lambda neg, view, mul, add: setattr(add, "kwargs", {"alpha": 2}), r"%add.*: operands"),
    "name": (lambda neg, view, mul, add: setattr(neg, "name", "exp"), r"%neg.*as %exp stamped"),
    "module": (lambda neg, view, mul, add: neg.meta.update(custom={"module_fqn": "layers.1"}), r"%neg.*meta 'custom'"),
    "direction": (lambda neg, view, mul, add: add.meta.pop("autograd_backward"), r"%add.*meta 'autograd_backward'"),
    "a key more": (lambda neg, view, mul, add: neg.meta.update(mark=None), r"%neg.*meta 'mark'"),
    "extents": (lambda neg, view, mul, add: neg.meta.update(val=SMALLER), r"%neg.*meta 'val'"),
    "dtype": (lambda neg, view, mul, add: neg.meta.update(val=neg.meta["val"].double()), r"%neg.*meta 'val'"),
    "strides": (lambda neg, view, mul, add: neg.meta.update(val=neg.meta["val"].t()), r"%neg.*meta 'val'"),
    "memory": (lambda neg, view, mul, add: view.meta.update(val=neg.meta["val"]), r"%view.*: its memory is shared"),
    "forward node": (lambda neg, view, mul, add: add.meta.update(seq_nr=0), r"%add.*'seq_nr' belongs to another"),
    "order of numbers": (
        lambda neg, view, mul, add: (mul.meta.update(seq_nr=7), add.meta.update(seq_nr=7), view.meta.update(seq_nr=9)),
        "meta 'seq_nr' is in another order than in full",
    ),
    "equal numbers": (lambda neg, view, mul, add: view.meta.update(seq_nr=0), "'seq_nr' is in another order"),
    "a node more": (
        lambda neg, view, mul, add: add.graph.output_node().append(add.graph.create_node("get_attr", "more")),
        "7 nodes in full, 8 stamped",
    ),
}


def graph_with_numbers():
    graph = graphtext.parse(TWO).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    for node, number in zip(nodes, (0, 1, 2, 2), strict=True):
        node.meta["seq_nr"] = number
    return graph, nodes


def test_two_equal_graphs_do_not_differ():
    """The twin of what follows. Numbers that a thread counts need not be equal, only in the same order."""
    (full, _), (stamped, nodes) = graph_with_numbers(), graph_with_numbers()
    assert first_difference(full, stamped) is None
    for node, number in zip(nodes, (3, 8, 11, 11), strict=True):
        node.meta["seq_nr"] = number
    assert first_difference(full, stamped) is None


@pytest.mark.parametrize("what", TAMPERED)
def test_a_stamped_graph_that_is_not_the_full_one_is_told_at_its_first_node(what):
    """R1, R3: a comparison that is blind here would pass every stamped graph."""
    (full, _), (stamped, nodes) = graph_with_numbers(), graph_with_numbers()
    tamper, words = TAMPERED[what]
    tamper(*nodes)
    found = first_difference(full, stamped)
    assert found is not None, f"another {what} is not seen"
    assert re.search(words, found), found


def of_layers(**containers):
    model = torch.nn.Module()
    for name, layers in containers.items():
        setattr(model, name, layers)
    return model


def linear(count, width=2):
    return torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))


@pytest.mark.parametrize(
    ("containers", "runs"),
    [
        ({"layers": linear(5)}, [("layers", 0, 1, 5)]),
        ({"layers": linear(4)}, []),
        ({"layers": linear(6), "layers_more": linear(5)}, [("layers", 0, 1, 6), ("layers_more", 0, 1, 5)]),
        ({"layers": torch.nn.ModuleList([*linear(1, 3), *linear(6)])}, [("layers", 1, 1, 6)]),
        ({"layers": torch.nn.ModuleList([*linear(5), *linear(6, 3)])}, [("layers", 0, 1, 5), ("layers", 5, 1, 6)]),
        ({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2 + i % 2) for i in range(11)])}, [("layers", 0, 2, 5)]),
        ({"layers": torch.nn.ModuleList(torch.nn.Sequential(*linear(5)) for _ in range(5))}, [("layers", 0, 1, 5)]),
        ({"stages": torch.nn.ModuleList([torch.nn.Sequential(*linear(5))])}, [("stages.0", 0, 1, 5)]),
        ({"layers": torch.nn.ModuleDict({f"block{i}": layer for i, layer in enumerate(linear(5))})},
         [("layers", 0, 1, 5)]),
    ],
    ids=["five", "four", "names that begin alike", "behind another", "two runs", "in turns", "layers of layers",
         "inside of a stage", "by name"],
)  # fmt: skip
def test_where_runs_of_equal_layers_are(containers, runs):
    """R2: more than four units; what lies in a run is not looked into, what begins with its name is."""
    found, full = find_runs(of_layers(**containers))
    assert [(run.container, run.first, run.period, run.units) for run in found] == runs, full


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
@pytest.mark.parametrize("mode", ["fully_shard", "replicate", None])
def test_llama_in_each_mode_is_its_full_trace_and_has_its_golden(gt_mesh, mode):
    assert_stamped(decoder(partial(llama, 6), gt_mesh, mode), ce_step, [("layers", 0, 1, 6)])


@pytest.mark.gt_world("fake", size=4, mesh={"replicate": 2, "shard": 2})
def test_hybrid_sharding(gt_mesh):
    assert_stamped(decoder(llama, gt_mesh, "hybrid_shard"), ce_step, [("layers", 0, 1, 7)])


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
@pytest.mark.parametrize("options", [{"gradient_divide_factor": 8.0}, {}], ids=["divided", "gathered on every read"])
def test_other_ways_to_reduce_and_gather(gt_mesh, options):
    model = decoder(llama, gt_mesh, **options)
    assert_stamped(model, ce_step, [("layers", 0, 1, 7)], reuse_gathers=bool(options))


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
def test_a_chunked_loss(gt_mesh):
    assert_stamped(decoder(llama, gt_mesh), chunked_ce_step(2), [("layers", 0, 1, 7)])


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
def test_dense_layers_then_experts_with_sizes_that_depend_on_data(gt_mesh):
    """Facts about the sizes are copied, too."""
    full, stamped = assert_stamped(decoder(deepseek, gt_mesh), ce_step, [("layers", 0, 1, 5), ("layers", 5, 1, 5)])
    assert facts_of(full) == facts_of(stamped) > 0


def facts_of(traced):
    values = (node.meta.get("val") for node in traced.gm.graph.nodes)
    env = next(value.node.shape_env for value in values if isinstance(value, torch.SymInt))
    return sum(map(len, env.deferred_runtime_asserts.values()))


@pytest.mark.gt_world("fake", size=4, mesh={"efsdp": 2, "ep": 2})
def test_expert_parallelism(gt_mesh):
    with torch.device("meta"):
        model = deepseek_v3.DeepSeekV3(replace(deepseek_v3.FLAVORS["debug"], n_layers=6))
    apply_expert_parallel(model, gt_mesh["ep"])
    for layer in model.moe_layers():
        data_parallel(layer.routed_experts, gt_mesh["efsdp"])
    data_parallel(model, gt_mesh["efsdp", "ep"]._flatten("fsdp"))
    assert_stamped(model, ce_step, [("layers", 1, 1, 5)])


def test_a_replay_gives_the_bits_of_the_full_trace():
    """And of other weights it does not."""
    torch.manual_seed(0)
    model, x = STAMPED["a list"](), torch.randn(4, WIDTH)
    results = []
    for how, own in (("off", model), ("auto", model), ("auto", STAMPED["a list"]())):
        copied = copy.deepcopy(own)
        loss = trace_step(copied, step, (x,), repeat_layers=how).replay(copied, x)
        results.append([loss, *(parameter.grad for parameter in copied.parameters())])
    full, stamped, other = results
    assert all(map(torch.equal, full, stamped))
    assert not all(map(torch.equal, full, other))


def exact(model):
    return trace_step(model, step, (torch.ones(4, WIDTH),), repeat_layers="exact")


def test_exact_passes_what_is_equal_and_says_what_it_did():
    assert exact(STAMPED["a list"]()).repeated.stamped
    assert exact(REFUSED["growing windows"][0]()).repeated.full


@pytest.mark.parametrize(
    ("module", "part", "instead", "build"),
    [
        (driver, "check_outline", lambda *given: None, REFUSED["the seventh layer is special"][0]),
        (driver, "check_outline", lambda *given: None, REFUSED["divided by the number of layers"][0]),
        (signature, "constant", lambda value: type(value), repeated.the_fourth_constant_differs),
        (units, "inner_difference", lambda *given: None, lambda: repeated.scaled_by_a_hidden_counter(2)),
    ],
    ids=["outline", "outline, of the end", "constants", "inner units"],
)
def test_without_a_part_of_the_proof_a_model_comes_out_wrong_and_exact_sees_it(
    monkeypatch, module, part, instead, build
):
    """Each part is needed: with it the model is traced in full."""
    assert not trace_step(build(), step, (torch.ones(4, WIDTH),), repeat_layers="auto").repeated.stamped
    monkeypatch.setattr(module, part, instead)
    with pytest.raises(StampedGraphError, match=r"node \d+, %\w+ of .*(operands|call_function|meta)"):
        exact(build())


@pytest.mark.parametrize(
    "build",
    [partial(repeated.scaled_by_a_hidden_counter, 8), repeated.a_layer_that_looks_for_itself],
    ids=["a counter in C", "a layer that looks for itself"],
)
def test_what_no_proof_can_see_exact_sees(build):
    """Documented as limits of "auto"."""
    with pytest.raises(StampedGraphError, match="operands"):
        exact(build())


def test_state_that_a_step_changes_is_put_back():
    model = REFUSED["layers that count their calls"][0]()
    trace_step(model, step, (torch.ones(4, WIDTH),), repeat_layers="auto")
    assert [layer.calls for layer in model.layers] == [1] * 8  # by the full trace alone


def numbered(forward=None):
    """Eight layers that count themselves; ``forward`` takes a layer and its input."""
    layers = [repeated.Layer(layer_id=index) for index in range(8)]
    for layer in layers:
        layer.__class__ = repeated.Layer if forward is None else type("Own", (repeated.Layer,), {"forward": forward})
    return repeated.Net(layers)


def test_an_attribute_that_only_counts_layers_may_be_ignored():
    """Without leave the layers differ; with it they are stamped, equal to the full trace, and keep their numbers."""
    model, inputs = numbered(), (torch.ones(4, WIDTH),)
    assert not trace_step(model, step, inputs, repeat_layers="auto").repeated.stamped
    stamped = trace_step(model, step, inputs, repeat_layers="exact", ignore=("layer_id",))
    assert [run.units for run in stamped.repeated.stamped] == [8], stamped.repeated.full
    full = trace_step(model, step, inputs)
    assert first_difference(full.gm.graph, stamped.gm.graph) is None
    assert [layer.layer_id for layer in model.layers] == list(range(8))


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        (lambda own: 2.0 if own.layer_id == 5 else 1.0, "`layer_id`, which ignore= names, is read"),
        (lambda own: 1.0 + own.layer_id % 2, "`layer_id`, which ignore= names, is read"),
        (lambda own: 1.0 / (1 + own.layer_id), "`layer_id`, which ignore= names, is read"),
        (lambda own: 2.0 if own.layer_id in {7} else 1.0, "`layer_id`, which ignore= names, is read"),
        (lambda own: ([1.0] * 7 + [2.0])[own.layer_id], "`layer_id`, which ignore= names, is read"),
        (lambda own: float(f"1.{own.layer_id}"), "`layer_id`, which ignore= names, is read"),
        (lambda own: own.layer_id.bit_length(), "bit_length"),
        (lambda own: 2.0 if isinstance(own.layer_id, int) else 1.0, "without what ignore= names the graph is another"),
    ],
    ids=["compared", "odd and even", "a divisor", "a member", "an index", "a text", "a method", "its type"],
)
def test_an_ignored_attribute_that_is_read_is_told(reads, reason):
    """The layers are traced in full, and equal: what was said to be harmless is believed of nobody."""
    model, inputs = numbered(lambda own, x: x + own.w(x).relu() * reads(own)), (torch.ones(4, WIDTH),)
    told = trace_step(model, step, inputs, repeat_layers="auto", ignore="layer_id")
    assert not told.repeated.stamped
    assert any(reason in layers.reason for layers in told.repeated.full), told.repeated.full
    assert first_difference(trace_step(model, step, inputs).gm.graph, told.gm.graph) is None
    assert [layer.layer_id for layer in model.layers] == list(range(8))


@pytest.mark.parametrize(
    ("name", "told"),
    [("layer_idx", "no module has it"), ("layer_id", "it is of type NoneType and int"), ("training", "of type bool")],
)
def test_what_does_not_count_layers_cannot_be_ignored(name, told):
    """A None among numbers may be told from them without being read."""
    model = numbered(lambda own, x: x if own.layer_id is None else x + own.w(x))
    model.layers[5].layer_id = None
    way_out = f"ignore='{name}': an attribute that counts layers is an int, or a str, and .*{told}"
    with pytest.raises(ValueError, match=way_out):
        trace_step(model, step, (torch.ones(4, WIDTH),), repeat_layers="auto", ignore=(name,))


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})
def test_chunking_and_recomputation_do_the_same_to_a_stamped_graph(gt_mesh):
    """Its twin is stamped, too. Without chunks it is another graph."""
    batch = token_batches(256, "cpu")(0, 0)
    texts = []
    for how, chunk in (("off", ChunkConfig("layers.*")), ("auto", ChunkConfig("layers.*")), ("auto", None)):
        model = decoder(partial(llama, 5), gt_mesh)
        traced = trace_step(model, ce_step, batch, chunk=chunk, repeat_layers=how)
        assert how == "off" or (len(traced.repeated.stamped), traced.repeated.full) == (1, ())
        passes = construct_default_graph_passes(n_layers=5, chunk=chunk, reshard_after_forward=True)
        texts.append(render(apply_graph_passes(traced.gm, None, passes, twin=traced.twin)))
    full, stamped, other = texts
    assert stamped == full
    assert other != full


def test_dynamic_dimensions_are_traced_in_full():
    model, inputs = STAMPED["a list"](), (torch.ones(4, WIDTH),)
    told = trace_step(model, step, inputs, repeat_layers="auto", dynamic_dims={"batch": [(0, 0)]}).repeated
    assert [layers.reason for layers in told.full] == ["dynamic dimensions are not proven"]


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="repeat_layers='always': expected one of 'off', 'auto', 'exact'"):
        trace_step(STAMPED["a list"](), step, (torch.ones(4, WIDTH),), repeat_layers="always")


@pytest.mark.parametrize("how", ["off", "auto"])
def test_no_garbage_is_collected_from_a_steps_call_to_its_backward(how):
    """A trace makes many objects that stay, and each collection visits them all."""
    seen = []

    def looking(model, x):
        seen.append(f"forward, collector {'on' if gc.isenabled() else 'off'}")
        gc.set_threshold(10, 1, 1)  # with the collector on, the next objects are enough for a collection
        loss = model(x).sum()
        loss.register_hook(lambda gradient: seen.append("backward"))
        return loss

    def collecting(phase, told):
        seen.append(f"a collection {phase}s")

    before = gc.get_threshold()
    gc.callbacks.append(collecting)
    try:
        trace_step(STAMPED["a list"](), looking, (torch.ones(4, WIDTH),), repeat_layers=how)
    finally:
        gc.callbacks.remove(collecting)
        gc.set_threshold(*before)
    calls = [place for place, what in enumerate(seen) if what.startswith("forward")]
    assert calls
    for place in calls:
        assert seen[place : place + 2] == ["forward, collector off", "backward"]


@pytest.mark.parametrize("on", [True, False])
def test_the_garbage_collector_is_as_it_was(on):
    (gc.enable if on else gc.disable)()
    try:
        trace_step(STAMPED["a list"](), step, (torch.ones(4, WIDTH),))
        assert gc.isenabled() is on
        with pytest.raises(ValueError, match="scalar loss"):
            trace_step(STAMPED["a list"](), lambda model, x: model(x), (torch.ones(4, WIDTH),))
        assert gc.isenabled() is on
    finally:
        gc.enable()


@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2})
def test_a_configuration_of_training_may_ask_for_it(gt_mesh, gt_world):
    """The graph's side trains with the bits of a full trace, and says what was stamped."""

    def deep(seed=0):
        built = llama3.Llama3(replace(llama3.FLAVORS["debug"], n_layers=8))
        built.init_weights(seed=seed)
        return built

    plan = get_default_transformer_block_buckets(n_layers=8)
    config = replace(llama3_training(gt_mesh, "fp32", model=deep, steps=1), bucket_plan=plan)
    with facts.collecting() as told:
        full, stamped = (train_graph(replace(config, repeat_layers=how), world=gt_world) for how in ("off", "auto"))
    assert [fact["outcome"] for fact in told if fact["kind"] == "repeated"] == ["stamped (4 of 8 in layers)"]
    assert_bitwise_equal(stamped, full)
    other = replace(config, model=partial(deep, seed=1), repeat_layers="auto")
    assert_bitwise_different(train_graph(other, world=gt_world), full)


class Counted:
    """What a step may hold, of its own class."""

    __slots__ = ("slot",)
    calls = 0

    def __init__(self):
        self.slot = 0


NUMBER = 0


def by_number(model, x):
    return NUMBER


def closing_over(value):
    """A step that holds ``value``; and one that rebinds what it closes over."""

    def step(model, x):
        return value

    def rebind(other):
        nonlocal value
        value = other

    return step, rebind


def held(value, change):
    return closing_over(value)[0], lambda: change(value), lambda: copy.deepcopy(value)


def rebound():
    step, rebind = closing_over(1)
    return step, lambda: rebind(2), lambda: step(None, None)


STATE = {
    "a list that grows": lambda: held([], lambda seen: seen.append(1)),
    "a list that shrinks": lambda: held([1], lambda seen: seen.pop()),
    "an item of a list": lambda: held([1, 2], lambda seen: seen.__setitem__(1, 3)),
    "a type in a list": lambda: held([1, 2], lambda seen: seen.__setitem__(1, 2.0)),
    "a list in a tuple": lambda: held(([],), lambda seen: seen[0].append(1)),
    "a set": lambda: held(set(), lambda seen: seen.add(1)),
    "a deque": lambda: held(collections.deque(), lambda seen: seen.append(1)),
    "bytes": lambda: held(bytearray(2), lambda seen: seen.__setitem__(0, 1)),
    "a new key": lambda: held({}, lambda seen: seen.update(a=1)),
    "a key less": lambda: held({"a": 1}, lambda seen: seen.clear()),
    "a value": lambda: held({"a": 1}, lambda seen: seen.update(a=2)),
    "an array": lambda: held(numpy.zeros(2), lambda seen: seen.__setitem__(0, 1)),
    "a slot": lambda: (closing_over(one := Counted())[0], lambda: setattr(one, "slot", 1), lambda: one.slot),
    "a class": lambda: (closing_over(Counted())[0], lambda: setattr(Counted, "calls", 1), lambda: Counted.calls),
    "a global": lambda: (by_number, lambda: globals().update(NUMBER=1), lambda: NUMBER),
    "what a function closes over": rebound,
    "an attribute of a function": lambda: (
        step := closing_over(1)[0], lambda: vars(step).update(calls=1), lambda: dict(vars(step))
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", STATE)
def test_state_that_a_step_changes_is_told_and_put_back(what):
    """R2: whatever holds it; a step that changes nothing is not refused."""
    step, change, look = STATE[what]()
    before = str(look())

    def run(change):
        with driver.unchanged_state(torch.nn.Linear(1, 1), step, ()):
            change()

    run(look)
    with pytest.raises(driver.Refused, match="the step changes"):
        run(change)
    assert str(look()) == before


@contextmanager
def set_for_a_while(set_to, now, value):
    before = now()
    set_to(value)
    yield
    set_to(before)


IN_FORCE = {
    "nothing": nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast in another dtype": lambda: torch.autocast("cpu", torch.float16),
    "autocast without its cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "autocast of the GPU": lambda: set_for_a_while(
        partial(torch.set_autocast_enabled, "cuda"), partial(torch.is_autocast_enabled, "cuda"), True
    ),
    "hooks of what is saved": lambda: torch.autograd.graph.saved_tensors_hooks(abs, abs),
    "other hooks of what is saved": lambda: torch.autograd.graph.saved_tensors_hooks(abs, torch.neg),
    "another dtype of factories": lambda: set_for_a_while(
        torch.set_default_dtype, torch.get_default_dtype, torch.float64
    ),
    "deterministic": lambda: set_for_a_while(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
    ),
}


def test_whatever_is_in_force_around_a_layer_is_told_apart():
    """R2: layers that run under other settings are not alike."""
    seen = {}
    for what, context in IN_FORCE.items():
        with context():
            seen[what] = outline.in_force()
    alike = [(one, other) for one in seen for other in seen if one < other and seen[one] == seen[other]]
    assert not alike
