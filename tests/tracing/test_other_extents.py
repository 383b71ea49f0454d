"""The same step at other extents: a second trace, its twin, or one trace that keeps a dimension as
a symbol.
"""

import pytest
import torch

from pytest_gtrainer import trace_step
from pytest_gtrainer.tracing.step import FixedExtentError, TwinTraceError

BATCH = {"batch": [(0, 0), (1, 0)]}


def shapes(gm):
    return [tuple(node.meta["val"].shape) for node in gm.graph.find_nodes(op="placeholder")]


def state_of(model):
    return [*model.parameters(), *model.buffers()]


def test_a_twin_is_the_same_step_on_other_inputs(net, inputs, train_step):
    """Given by hand, or made by what chunks; a rewritten graph has none, since the twin was not
    rewritten.
    """
    halves = tuple(value[:3] for value in inputs)

    class Halving:
        def twin_inputs(self, given):
            assert given is inputs
            return halves

    class Refusing:
        def twin_inputs(self, given):
            raise AssertionError("these were given by hand")

    alone = trace_step(net, train_step, inputs)
    assert len(alone.gradient_placements) == len(alone.trainable_fqns)
    for options in (
        {"twin_inputs": halves},
        {"chunk": Halving()},
        {"chunk": Refusing(), "twin_inputs": halves},
    ):
        traced = trace_step(net, train_step, inputs, **options)
        assert shapes(traced.twin)[-2:] == [(3, 8), (3, 4)]
        assert shapes(traced.gm)[-2:] == [(6, 8), (6, 4)]
        loss, *_ = traced.twin(*state_of(net), *halves)
        assert torch.equal(loss, train_step(net, *halves))
        other = traced.with_graph(traced.twin)
        assert (other.gm, other.twin) == (traced.twin, None)
        assert traced.gradient_placements == alone.gradient_placements
    assert alone.twin is None


def test_a_twin_of_another_structure_is_refused(net, inputs, train_step):
    with pytest.raises(
        TwinTraceError,
        match=r"(?s)the twin's inputs are structured as .*\*.*, the step's as .*\*.*\*",
    ):
        trace_step(net, train_step, inputs, twin_inputs=inputs[:1])


def test_a_twin_that_cannot_be_traced_is_refused_with_its_inputs_and_the_line(
    net, inputs, train_step
):
    def fixed(model, x, y):
        return train_step(model, x.view(6, 8), y)

    message = (
        r"inputs \(float32\[3, 8\], float32\[3, 4\]\) at .*test_other_extents\.py:\d+: .*\nTake .* "
        r"x\.shape\[i\]"
    )
    with pytest.raises(TwinTraceError, match=message):
        trace_step(net, fixed, inputs, twin_inputs=tuple(value[:3] for value in inputs))


def test_a_dynamic_dimension_is_one_symbol(net, inputs, train_step):
    """Its inputs share it, the state has none; the graph runs at other extents, and names the
    extent of the example.
    """
    traced = trace_step(net, train_step, inputs, dynamic_dims=BATCH)
    *state, (rows, width), (labels, _) = shapes(traced.gm)
    assert state == [tuple(tensor.shape) for tensor in state_of(net)]
    assert isinstance(rows, torch.SymInt)
    assert (str(rows), width) == (str(labels), 8)
    symbol, extent = traced.gm.graph.output_node().meta["gt_dynamic_dims"]["batch"]
    assert (str(symbol), extent) == (str(rows), 6)
    fewer = tuple(value[:4] for value in inputs)
    loss, *_ = traced.gm(*state_of(net), *fewer)
    assert torch.equal(loss, train_step(net, *fewer))
    assert "gt_dynamic_dims" not in trace_step(net, train_step, inputs).gm.graph.output_node().meta


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda x: x.view(6, 8),
            r"fixes the dynamic dimension batch to 6: take extents from x\.shape\[i\]",
        ),
        (
            lambda x: x * float(x.shape[0]),
            r"a size that is not known at .*test_other_extents\.py:\d+: .*\bu\d+\b",
        ),
    ],
    ids=["a fixed number", "a decision of Python's"],
)
def test_a_step_that_fixes_a_dynamic_dimension_is_refused(net, inputs, train_step, spoil, message):
    with pytest.raises(FixedExtentError, match=message):
        trace_step(
            net, lambda model, x, y: train_step(model, spoil(x), y), inputs, dynamic_dims=BATCH
        )
