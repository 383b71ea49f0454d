"""Runs of a graph from one start, whatever has happened since."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import (
    NetModel,
    Record,
    apply_graph_passes,
    assert_bitwise_different,
    assert_bitwise_equal,
    facts,
)
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer.bisect import (
    PassWitness,
    Stage,
    bisect_stages,
    bisect_towards,
    flat_inputs,
    local_run,
    results_of_step,
    run_on_all,
)
from pytest_gtrainer.numerics.compare import BitwiseDifference
from pytest_gtrainer.numerics.graph_run import copies
from pytest_gtrainer.numerics.verdict import PHASES, Key
from pytest_gtrainer.worlds.simulated.interpreter import PerRank, RankGraph, RankRandomStates
from tests.numerics.test_bisect import BATCH, HARMLESS, Net, pipeline, traced_net


def by_name(values):
    return {key.name: value for key, value in values.items()}


def test_a_run_starts_where_it_was_made():
    """A run does not see later writes to inputs or draws of random numbers, and leaves none."""
    gm, model = traced_net().gm, Net()
    flat = flat_inputs((model, *BATCH))
    run = local_run(flat)
    first = by_name(run(gm))
    assert {"loss", "scale", "steps afterwards"} <= first.keys()
    state = torch.get_rng_state()
    assert_bitwise_equal(by_name(run(gm)), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.steps == 0
    torch.rand(1)
    with torch.no_grad():
        model.scale.mul_(2)
    assert_bitwise_equal(by_name(run(gm)), first)
    assert_bitwise_different(by_name(local_run(flat)(gm)), first, what="from another start")


def test_a_run_on_all_ranks_has_the_results_and_buffers_of_each():
    """Copies share what ranks of a simulated world share; each run starts from the same state."""

    def step(x, steps):
        steps.add_(x.sum())
        return x * steps + torch.rand(3)

    gm = make_fx(step)(torch.ones(3), torch.zeros(()))
    gm.graph.find_nodes(op="placeholder")[1].meta["gt_input"] = {"kind": "buffer", "fqn": "steps"}
    xs, counts = (
        [torch.full((3,), float(rank)) for rank in (1, 2)],
        [torch.zeros(()), torch.ones(())],
    )
    states = RankRandomStates([torch.Generator().manual_seed(seed).get_state() for seed in (3, 4)])
    run = run_on_all(
        lambda gm: RankGraph(gm, 0, 2, {}),
        NetModel.of_world(2),
        [PerRank(xs), PerRank(counts)],
        states,
    )
    first, again = run(gm), run(gm)
    assert_bitwise_equal(by_name_and_rank(again), by_name_and_rank(first))
    assert [count.item() for count in counts] == [0.0, 1.0], "the caller's buffers are left alone"
    for rank, (x, start) in enumerate(zip(xs, (0.0, 1.0), strict=True)):
        with random_states_kept():
            torch.manual_seed(3 + rank)
            expected = x * (start + x.sum()) + torch.rand(3)
        assert first[Key(0, rank, "", "output 0")].equal(expected), (
            f"rank {rank}, with its own random numbers"
        )
        assert first[Key(0, rank, "", "steps afterwards")].item() == start + x.sum().item()


def by_name_and_rank(values):
    return {f"{key.name} of {key.rank}": value for key, value in values.items()}


def stages_of(*functions):
    """Trace each function of one tensor: the input graph, then those behind passes a, b, c, ..."""
    graphs = [make_fx(function)(torch.ones(3)) for function in functions]
    return [Stage(name, gm) for name, gm in zip(["", *"abcdefgh"], graphs, strict=False)]


def times(factor):
    return lambda x: (x * factor,)


@pytest.mark.parametrize(
    ("factors", "expected", "name"),
    [
        ((1, 2, 2, 3), 2, "c"),
        ((2, 2, 1, 2, 4, 4), 2, "d"),
        ((2, 5), 2, "a"),
        ((1, 2, 3), 3, ""),
        ((1, 2, 3), 7, None),
    ],
    ids=[
        "the last that was right",
        "right, wrong, right, wrong",
        "the first pass",
        "right in the end",
        "never right",
    ],
)
def test_towards_an_expected_result_the_pass_behind_the_longest_right_prefix_is_named(
    factors, expected, name
):
    """Another run's results are what the graph should give; a part of them is enough."""
    x = torch.tensor([1.0, 3.0, 5.0])
    found = bisect_towards(
        stages_of(*map(times, factors)),
        local_run([x]),
        {Key(0, 0, "", "output 0"): x * float(expected)},
    )
    assert (found and found.name) == name
    assert found is None or (found.outcome == "equal") == (name == ""), "all passes give it"


def test_of_all_ranks_the_first_node_that_differs_is_named_with_its_rank():
    """Rank 1 differs at the sine, rank 0 only at the sum behind it: the sine is where it begins."""
    before, after = (
        make_fx(f)(torch.ones(2)) for f in (lambda x: (x.sin() + x,), lambda x: (x.cos() + x,))
    )
    for old, new in zip(before.graph.nodes, after.graph.nodes, strict=True):
        new.name = old.name  # one node, whose operator a pass has exchanged
    inputs = {0: torch.full((2,), 2.0), 1: torch.ones(2)}

    def run(gm):
        found = {}
        for rank, x in inputs.items():
            for key, value in local_run([x])(gm).items():
                if rank == 1 or key.name != "sin":
                    found[key._replace(rank=rank)] = value
        return found

    found = bisect_stages([Stage("", before), Stage("exchange", after)], run)
    assert found.name == "exchange"
    assert found.where == "sin = aten.cos.default in the forward on rank 1"


def test_copies_share_what_the_values_share():
    """Two inputs or ranks may be one buffer: a replay writes to one copy of it."""
    one, other = torch.zeros(2), torch.zeros(2)
    made = copies([one, 3, one, PerRank([one, other]), None])
    assert made[0] is made[2] is made[3][0], "one tensor of three places has become several"
    assert made[0] is not one
    assert type(made[3]) is PerRank
    assert made[3][1] is not made[0], "two tensors of equal numbers stay two"
    assert (made[1], made[4]) == (3, None)


def test_a_comparison_that_differs_names_the_pass_of_what_was_replayed_before():
    """--gt-bisect bisects the pipeline whose graph was replayed, from the inputs of that replay."""
    witness, traced = PassWitness(), traced_net()

    def gradients(step, scale=1.0):
        model = Net()
        torch.manual_seed(0)
        step.replay(model, *(each * scale for each in BATCH))
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients(traced)
    with facts.watching(witness.watchers()):
        with pytest.raises(
            BitwiseDifference,
            match="bisection: no graph was rewritten by apply_graph_passes and rep",
        ):
            assert_bitwise_equal(torch.ones(1), torch.zeros(1))
        rewritten = traced.with_graph(
            apply_graph_passes(traced.gm, traced.example_inputs, pipeline(1), progress=None)
        )
        harmless = traced.with_graph(
            apply_graph_passes(traced.gm, traced.example_inputs, HARMLESS, progress=None)
        )
        gradients(rewritten, scale=0.0)  # of zeros every order gives the same sum
        right, wrong = gradients(harmless), gradients(rewritten)
        assert_bitwise_equal(right, expected)
        with pytest.raises(BitwiseDifference) as caught:
            assert_bitwise_equal(wrong, expected)
    text = str(caught.value)
    assert "bisection of replay 2: introduced by pass 2 of 6, reassociate_pass (" in text
    assert "bisection: all 5 passes together change no bit (2 replays)" in text, (
        "the other pipeline"
    )


@pytest.mark.parametrize(
    ("rank", "own"), [(None, [0, 1]), (1, [0])], ids=["of all ranks", "of one rank's process"]
)
def test_what_a_record_expects_of_a_graph_at_a_step(rank, own):
    """A graph gives losses, gradients before clipping, and buffers; a lone process is rank 0."""
    record = Record(2, rank)
    for each in record.expected_ranks:
        for step in (0, 1):
            for phase in PHASES:
                record.add(step, each, phase, phase[:2], torch.tensor([10.0 * step + each]))
    found = results_of_step(record, 1)
    names = ["lo", "gr", "bu afterwards"]
    assert sorted(found) == sorted(Key(0, each, "", name) for each in own for name in names)
    last = rank if rank is not None else 1
    assert found[Key(0, own[-1], "", "lo")].item() == 10 + last, "of the step that is asked for"


@pytest.mark.parametrize("wrong_first", [True, False])
def test_passes_that_are_applied_in_two_calls_are_bisected_as_one_pipeline(wrong_first):
    """The pass that changes a bit may be of the call before the one whose result is replayed."""
    witness, traced = PassWitness(), traced_net()
    parts = [pipeline(1), HARMLESS]
    if not wrong_first:
        parts.reverse()

    def gradients(step):
        model = Net()
        torch.manual_seed(0)
        step.replay(model, *BATCH)
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients(traced)
    with facts.watching(witness.watchers()):
        gm = traced.gm
        for part in parts:
            gm = apply_graph_passes(gm, traced.example_inputs, part, progress=None)
        with pytest.raises(BitwiseDifference) as caught:
            assert_bitwise_equal(gradients(traced.with_graph(gm)), expected)
    place = 2 + (0 if wrong_first else len(HARMLESS))
    total = len(parts[0]) + len(parts[1])
    expected_words = f"bisection: introduced by pass {place} of {total}, reassociate_pass ("
    assert expected_words in str(caught.value)
