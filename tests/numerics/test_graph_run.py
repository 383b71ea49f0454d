"""Effects of two graphs are compared as their results are, also on extreme inputs (V2).

Each case has a twin that is equal.
"""

import random

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fixtures.graph_pairs import (
    BESIDE_RESULTS,
    EQUAL,
    ON_EXTREMES,
    graph_with_a_table,
    graphs_of,
    product,
)
from pytest_gtrainer import assert_pass_bitwise
from pytest_gtrainer._torch.random_states import GeneratorStates
from pytest_gtrainer.bisect import Stage, bisect_extremes, bisect_stages, local_run
from pytest_gtrainer.numerics.compare import BitwiseDifference, ControlFailed, compare
from pytest_gtrainer.numerics.graph_run import all_nan, named_outputs, run_graph, with_one_nan
from pytest_gtrainer.testing.running import NothingShows, assert_same_values


def by_pass(before, after):
    """With a node that nobody reads: two graphs without a difference are refused."""
    read = next(iter(after.graph.nodes))
    with after.graph.inserting_before(after.graph.output_node()):
        after.graph.call_function(torch.ops.aten.detach.default, (read,))
    assert_pass_bitwise((before, after))


def by_values(before, after):
    assert_same_values(after, before, "after against before")


def by_bisection(before, after):
    torch.manual_seed(0)
    inputs, stages = (
        [torch.randn(4, 4), torch.randn(3, 4)],
        [Stage("", before), Stage("the pass", after)],
    )
    for found in (
        bisect_stages(stages, local_run(inputs)),
        bisect_extremes(stages, local_run, inputs),
    ):
        if found.outcome == "different":
            raise BitwiseDifference(f"{found}\n{found.verdict}", found.verdict)


PLACES = [by_pass, by_values, by_bisection]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pair", BESIDE_RESULTS)
def test_what_a_pass_does_beside_its_results_is_seen(place, pair):
    """V2"""
    before, after, what = BESIDE_RESULTS[pair]
    with pytest.raises(BitwiseDifference, match=f"(first at|equal, but not) {what}"):
        place(*graphs_of(before, after))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pair", ON_EXTREMES)
def test_what_a_pass_does_to_extreme_values_is_seen(place, pair):
    """V2"""
    before, after, where = ON_EXTREMES[pair]
    with pytest.raises(BitwiseDifference, match=f"on inputs with ({where})"):
        place(*graphs_of(before, after))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pair", EQUAL)
def test_what_two_graphs_do_alike_is_equal(place, pair):
    """Also which NaN it is does not count: kernels give one or the other."""
    place(*graphs_of(*EQUAL[pair]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("writes", [True, False])
def test_a_write_to_an_attribute_of_the_module_is_seen_and_put_back(place, writes):
    """V2"""
    before, after = graph_with_a_table(writes=not writes), graph_with_a_table(writes=writes)
    with pytest.raises(BitwiseDifference, match="attribute table afterwards"):
        place(before, after)
    place(graph_with_a_table(writes=writes), after)
    assert torch.equal(after.table, torch.ones(2))


def log_of_negative(weight, rows):
    return (-(rows @ weight).abs() - 1).log()


def test_where_every_result_is_nan_the_check_says_so():
    """V6: it could not have failed."""
    before, after = graphs_of(log_of_negative, log_of_negative)
    with pytest.raises(
        ControlFailed,
        match=r"nothing but NaN on all inputs, so no difference could be seen: output 0",
    ):
        by_pass(before, after)
    with pytest.raises(
        NothingShows, match="output 0: nothing but NaN on normally distributed inputs"
    ):
        by_values(before, after)
    inputs = [torch.randn(4, 4), torch.randn(3, 4)]
    stages = [Stage("", before), Stage("the pass", after)]
    assert str(bisect_stages(stages, local_run(inputs))) == (
        "no pass of 1 changes a bit (2 replays); every result is NaN on the inputs as they were "
        "given, so nothing could differ there"
    )


@pytest.mark.parametrize("several", [False, True])
def test_results_that_are_all_empty_prove_nothing(several):
    """V6: one element is enough."""

    def empty(weight, rows):
        return (rows[:0].exp(), weight[:, :0]) if several else rows[:0].exp()

    with pytest.raises(NothingShows, match="no result has an element on normally distributed"):
        by_values(*graphs_of(empty, empty))
    some = graphs_of(*[lambda weight, rows: (rows[:0].exp(), rows.exp())] * 2)
    by_values(*some)


def root(weight, rows):
    return rows @ weight, (-rows.abs() - 1).sqrt()


def logarithm(weight, rows):
    return rows @ weight, (-rows.abs() - 1).log()


@pytest.mark.parametrize("last", [True, False])
def test_one_result_that_is_nothing_but_nan_is_named(last):
    """V6: beside a result of numbers."""
    before, after = graphs_of(root, logarithm)
    if not last:
        for gm in (before, after):
            gm.graph.output_node().args = (tuple(reversed(gm.graph.output_node().args[0])),)
    name = "output 1" if last else "output 0"
    with pytest.raises(ControlFailed, match=f"so no difference could be seen: {name}"):
        by_pass(before, after)
    with pytest.raises(NothingShows, match=f"{name}: nothing but NaN"):
        by_values(before, after)
    inputs = [torch.randn(4, 4), torch.randn(3, 4)]
    stages = [Stage("", before), Stage("the pass", after)]
    found = bisect_stages(stages, local_run(inputs))
    assert found.nan == (f"0 {name}",)
    assert str(found).endswith(f"; nothing but NaN, so nothing could differ: 0 {name}")


def test_a_result_that_is_a_number_on_some_inputs_is_compared():
    """Half of all normal numbers have no root."""

    def one(weight, rows):
        return rows @ weight, rows.sqrt()

    def other(weight, rows):
        return rows @ weight, rows.log()

    with pytest.raises(BitwiseDifference, match="output 1"):
        by_pass(*graphs_of(one, other))


STRUCTURES = {
    "nested": (lambda b: (b, (b,)), lambda b: (b, b)),
    "keys": (lambda b: {"a": b}, lambda b: {"b": b}),
    "list": (lambda b: (b, [b]), lambda b: (b, (b,))),
    "None at the end": (lambda b: (b, None), lambda b: (b,)),
    "empty": (lambda b: (b, ()), lambda b: (b,)),
    "text": (lambda b: (b, "x"), lambda b: (b, "y")),
    "number": (lambda b: (b, 2), lambda b: (b, 2.0)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_structure_of_results_is_compared(place, kind):
    """V2"""
    before, after = graphs_of(product, product)
    for gm, structure in zip((before, after), STRUCTURES[kind], strict=True):
        output = gm.graph.output_node()
        output.args = (structure(output.all_input_nodes[0]),)
        gm.recompile()
    what = "first at output 1: dtype" if kind == "number" else "output structure"
    with pytest.raises(BitwiseDifference, match=what):
        place(before, after)


@pytest.mark.parametrize("place", PLACES)
def test_results_in_a_dict_are_compared_by_key(place):
    """V2: their order is no difference, another value behind a key is one."""
    structures = {
        "before": lambda a, b: {"a": a, "b": b},
        "other order": lambda a, b: {"b": b, "a": a},
        "swapped": lambda a, b: {"b": a, "a": b},
    }
    graphs = {}
    for name, structure in structures.items():
        graphs[name], _ = graphs_of(lambda w, x: (x @ w, x + 1), product)
        output = graphs[name].graph.output_node()
        output.args = (structure(*output.all_input_nodes),)
        graphs[name].recompile()
    place(graphs["before"], graphs["other order"])
    with pytest.raises(BitwiseDifference):
        place(graphs["before"], graphs["swapped"])


@pytest.mark.parametrize("place", PLACES)
def test_a_list_of_results_is_a_tuple(place):
    """Passes that replace one result often make a list of all."""
    before, after = graphs_of(product, product)
    for gm, kind in ((before, list), (after, tuple)):
        output = gm.graph.output_node()
        output.args = (kind(output.all_input_nodes),)
        gm.recompile()
    place(before, after)


def minus_itself(weight, rows):
    found = rows @ weight
    return (found - found).sum()


def test_extreme_inputs_on_which_every_result_is_nan_are_named():
    """V6: whichever input has them."""
    inputs = [torch.randn(4, 4), torch.randn(3, 4)]
    stages = [Stage("", gm) for gm in graphs_of(minus_itself, minus_itself)]
    found = bisect_extremes(stages, local_run, inputs)
    assert (found.outcome, found.silent) == ("equal", ("inputs with infinities", "inputs with NaN"))
    assert assert_same_values(stages[0].gm, stages[1].gm, "") == [
        "inputs with infinities",
        "inputs with NaN",
    ]


def test_where_all_inputs_spoil_every_result_one_alone_is_tried():
    """An infinite weight makes all results NaN, an infinite row does not."""

    def by_row(weight, rows):
        return rows.sum(1) + (weight - weight).sum()

    def by_row_clamped(weight, rows):
        return rows.sum(1).clamp(-1e30, 1e30) + (weight - weight).sum()

    with pytest.raises(BitwiseDifference, match="on inputs with infinities in graph input 1 alone"):
        by_values(*graphs_of(by_row, by_row_clamped))


def test_a_run_leaves_random_states_as_they_were():
    """The graph starts from those that it is given."""

    def draws(weight, rows):
        return rows @ weight + torch.rand(4)

    (gm,) = graphs_of(draws)
    start, inputs = GeneratorStates.now(), [torch.zeros(4, 4), torch.zeros(3, 4)]
    torch.rand(7)
    cpu, python = torch.get_rng_state(), random.getstate()
    first, second = run_graph(gm, inputs, start), run_graph(gm, inputs, start)
    assert torch.equal(first.outputs["output 0"], second.outputs["output 0"])
    assert (torch.get_rng_state().equal(cpu), random.getstate()) == (True, python)
    assert {
        "input weight afterwards",
        "input rows afterwards",
        "random state of torch.cpu afterwards",
    } <= first.state.keys()


def test_a_result_that_is_an_attribute_keeps_what_the_run_wrote():
    """The attribute is put back, the result is not."""
    gm = graph_with_a_table(writes=True)
    gm.graph.output_node().args = (tuple(gm.graph.find_nodes(op="get_attr")),)
    gm.recompile()
    run = run_graph(gm, [torch.zeros(4, 4), torch.zeros(3, 4)], GeneratorStates.now())
    assert (run.outputs["output 0"].tolist(), gm.table.tolist()) == ([2.0, 2.0], [1.0, 1.0])


def test_parameters_of_called_modules_are_attributes_too():
    """``fx.symbolic_trace`` gives such graphs: batch norm counts and averages."""
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.BatchNorm1d(4)).train())
    before = {name: value.clone() for name, value in gm.state_dict().items()}
    run = run_graph(gm, [torch.randn(3, 4)], GeneratorStates.now())
    written = {name for name in run.state if name.startswith("attribute ")}
    assert written == {
        f"attribute 0.{each} afterwards"
        for each in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert all(torch.equal(value, before[name]) for name, value in gm.state_dict().items())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
)
def test_nan_is_told_from_a_number_in_each_dtype(dtype):
    nan, number = torch.full((2,), torch.nan).to(dtype), torch.tensor([torch.nan, -0.0]).to(dtype)
    assert all_nan({"a": nan, "b": torch.zeros(0), "c": torch.arange(2)})
    assert not all_nan({"a": nan, "b": number})
    assert not all_nan({"c": torch.arange(2)})
    other = torch.tensor([-torch.nan, -0.0]).to(dtype)
    one, same = with_one_nan({"a": number})["a"], with_one_nan({"a": other})["a"]
    assert one.view(torch.uint8).equal(same.view(torch.uint8))
    assert torch.signbit(torch.view_as_real(one)[1, 0] if dtype.is_complex else one[1])


@pytest.mark.parametrize("place", [0, 1])
def test_a_part_of_a_complex_number_beside_a_nan_counts(place):
    numbers = torch.tensor([[1.0], [2.0]])
    nan = torch.tensor([torch.nan])
    made = []
    for number in numbers:
        parts = [nan, nan]
        parts[place] = number
        made.append(with_one_nan({"a": torch.complex(*parts)})["a"])
    assert compare(*made).outcome == "different"


def test_a_parameter_called_loss_does_not_hide_the_loss():
    """V2"""

    def doubled(loss: torch.Tensor, rows: torch.Tensor):
        return (rows @ loss).sum() * 2, rows.sum(0)

    def step(loss: torch.Tensor, rows: torch.Tensor):
        return (rows @ loss).sum(), rows.sum(0)

    before, after = (make_fx(each)(torch.ones(4), torch.ones(3, 4)) for each in (step, doubled))
    for gm in (before, after):
        gm.graph.output_node().meta["gt_outputs"] = ("loss", "loss")
    names = [*run_graph(before, [torch.ones(4), torch.ones(3, 4)]).outputs]
    assert names == ["loss", "loss (output 1)", "output structure (*, *)"]
    with pytest.raises(BitwiseDifference, match="first at output loss"):
        assert_same_values(after, before, "after against before")
    assert_same_values(before, before, "the same")


def test_a_pass_that_inserts_a_clamp_is_named_with_its_inputs():
    """The first run is on the inputs as they were given."""
    (before,) = graphs_of(product)
    _, after = graphs_of(product, ON_EXTREMES["a clamp is inserted"][1])
    with pytest.raises(BitwiseDifference) as caught:
        assert_pass_bitwise((before, after))
    message = str(caught.value)
    assert message.startswith(
        "the pass changed the numbers, on inputs with large numbers in some inputs\n"
    )
    assert (
        "introduced by pass 1 of 1, the pass (4 replays), on inputs with large numbers in "
        "some inputs" in message
    )


@pytest.mark.parametrize("number", [1 / 3, 1 / 3 + 1j], ids=["float", "complex"])
def test_python_numbers_are_compared_in_all_their_bits(number):
    next_one = number * (1 + 2**-50)
    assert next_one != number
    made, other = (named_outputs((each,))["output 0"] for each in (number, next_one))
    assert made.item() == number
    assert other.item() == next_one
