"""Dynamo's graph with its backward, traced in one process: the tangent of each output."""

import pytest
import torch
from torch import fx
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.compiling.eager import EagerTrace, flat_size

A, B = torch.arange(4.0), torch.tensor([3.0, -1.0])
WEIGHTS = torch.full((4,), 5.0), torch.full((2,), 7.0)


def graph_of(*inputs):
    """Return the graph ``2 a, 3 b`` for inputs, as Dynamo leaves it."""
    graph = fx.Graph()
    results = []
    for place, value in enumerate(inputs):
        node = graph.placeholder(f"x{place}")
        node.meta["example_value"] = value
        results.append(graph.call_function(torch.mul, (node, place + 2)))
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def flat(*values):
    """Return values as AOTAutograd takes them: behind a DTensor's part stands its mesh."""
    found = []
    for value in values:
        is_distributed = isinstance(value, DTensor)
        found += [value.to_local(), None] if is_distributed else [value]
    return found


def traced(inputs, weights, trained=(True, True)):
    primals = flat(*inputs)
    n_outputs = sum(map(flat_size, inputs))
    trace = EagerTrace(graph_of(*inputs), trained, len(primals), n_outputs)
    values = [*primals, *weights]
    gm = trace.trace(values)
    return gm(*[value for value in values if isinstance(value, torch.Tensor)])


def test_each_output_has_the_tangent_at_its_place():
    first, second, *gradients = traced((A, B), WEIGHTS)
    assert torch.equal(first, 2 * A)
    assert torch.equal(second, 3 * B)
    assert torch.equal(gradients[0], 2 * WEIGHTS[0])
    assert torch.equal(gradients[1], 3 * WEIGHTS[1])


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_an_input_that_is_not_trained_has_no_gradient(trained):
    weight = [each for each, yes in zip(WEIGHTS, trained, strict=True) if yes]
    *_, one, other = traced((A, B), weight, trained)
    assert [one is not None, other is not None] == list(trained)


@pytest.mark.gt_world("fake", size=2)
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=str)
def test_behind_a_dtensor_the_tangent_of_the_next_one_is_found(gt_mesh, which, placement):
    inputs = []
    for value, is_distributed in zip((A, B), which, strict=True):
        distributed = DTensor.from_local(value, gt_mesh, [placement], run_check=False)
        inputs.append(distributed if is_distributed else value)
    weights = []
    for weight, is_distributed in zip(WEIGHTS, which, strict=True):
        weights += [weight, None] if is_distributed else [weight]
    results = [each for each in traced(inputs, weights) if each is not None]
    for found, wanted in zip(results, (2 * A, 3 * B, 2 * WEIGHTS[0], 3 * WEIGHTS[1]), strict=True):
        assert torch.equal(found, wanted)


def test_another_number_of_inputs_results_or_tangents_is_told():
    gm = graph_of(A, B)
    for counts, values, words in (
        ((1, 2), [A], "Dynamo's graph has 2 inputs, which AOTAutograd takes as 1"),
        ((2, 3), [A, B], "Dynamo's graph has 2 outputs, that of AOTAutograd 3"),
        ((2, 2), [A, B, A], "gradients of 2 outputs, that of AOTAutograd 1 input for gradients"),
    ):
        with pytest.raises(NoMeaning, match=words):
            EagerTrace(gm, (True, True), *counts).trace(values)
