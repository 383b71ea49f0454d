"""V6: a run that is not finite says so, and proves nothing.

NaN and inf have the same bits, however they were computed.
"""

import math

import pytest
import torch

from pytest_gtrainer import (
    BitwiseDifference,
    ControlFailed,
    Record,
    assert_bitwise_different,
    assert_bitwise_equal,
    assert_run_to_run,
    compare,
    facts,
)
from pytest_gtrainer.numerics.bits import count_not_finite
from pytest_gtrainer.numerics.compare import compare_control
from pytest_gtrainer.numerics.run_to_run import PRESSURES

BAD = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
OF_A_RUN = ("loss", "gradient", "clipped")


def run_with(phase: str, value: float, elements: int = 4, step: int = 1, rank: int = 1) -> Record:
    """A run of two ranks and two steps, some elements of whose tensor at one place have a value."""
    record = Record(2)
    for each_step in range(2):
        for each_rank in range(2):
            for name in ("loss", "gradient", "clipped", "weight"):
                tensor = torch.arange(1.0, 5.0)
                if (each_step, each_rank, name) == (step, rank, phase):
                    tensor[4 - elements :] = value
                record.add(each_step, each_rank, name, "loss" if name == "loss" else "w", tensor)
    return record


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("phase", OF_A_RUN)
@pytest.mark.parametrize(("step", "rank"), [(0, 0), (1, 1)])
def test_a_run_without_finite_numbers_is_unverified(bad: str, phase: str, step: int, rank: int):
    """V6"""
    sides = [run_with(phase, BAD[bad], step=step, rank=rank) for _ in range(2)]
    verdict = compare(*sides)
    assert verdict.outcome == "unverified"
    name = {"loss": "loss", "gradient": "gradient of w", "clipped": "clipped gradient of w"}[phase]
    assert (
        f"the run is not finite: step {step}, rank {rank}, {name} is NaN or infinite"
        in verdict.reasons[0]
    )
    with pytest.raises(BitwiseDifference, match="smaller learning rate"):
        assert_bitwise_equal(*sides)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("phase", ["gradient", "clipped"])
def test_a_gradient_in_part_infinite_is_equal_and_says_so(bad: str, phase: str):
    """V6: the other elements were compared."""
    verdict = compare(*(run_with(phase, BAD[bad], elements=3) for _ in range(2)))
    assert (verdict.outcome, verdict.label) == ("equal", "equal (not finite)")
    names = {"gradient": "gradient", "clipped": "clipped gradient"}
    assert str(verdict).splitlines()[1:] == [
        "  equal, but not finite, which proves nothing: NaN and inf hide what computes them",
        f"    step 1, rank 1, {names[phase]} of w: 3 of 4 elements",
    ]


def test_one_element_of_a_loss_is_enough():
    """V6: a loss for each token, say."""
    assert (
        compare(*(run_with("loss", math.nan, elements=1) for _ in range(2))).outcome == "unverified"
    )


@pytest.mark.parametrize("phase", ["weight"])
def test_what_is_meant_can_be_compared(phase: str):
    """A gradient scaler skips a step with infinite gradients; its weights stay as they were."""
    sides = [run_with("gradient", math.inf).select(phase=phase) for _ in range(2)]
    assert assert_bitwise_equal(*sides).label == "equal"


def test_a_difference_outweighs_it():
    verdict = compare(run_with("loss", math.nan), run_with("gradient", math.nan))
    assert verdict.outcome == "different"


VALUES = {
    "float32": torch.tensor([1.0, math.nan]),
    "float64": torch.tensor([1.0, -math.inf], dtype=torch.float64),
    "bfloat16": torch.tensor([1.0, math.inf], dtype=torch.bfloat16),
    "float16": torch.tensor([1.0, math.nan], dtype=torch.float16),
    "float8_e4m3fn": torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.tensor([1.0, math.inf]).to(torch.float8_e5m2),
    "float8_e8m0fnu": torch.tensor([1.0, math.nan]).to(torch.float8_e8m0fnu),
    "complex64": torch.tensor([1.0, complex(0, math.inf)], dtype=torch.complex64),
    "complex128": torch.tensor([1.0, complex(math.nan, 0)], dtype=torch.complex128),
}


@pytest.mark.parametrize("dtype", VALUES)
def test_values_outside_a_run_are_equal_and_say_so(dtype: str):
    """V6: a mask may hold -inf on purpose. The summary counts such a verdict apart."""
    value = VALUES[dtype]
    with facts.collecting() as seen:
        verdict = assert_bitwise_equal({"mask": value}, {"mask": value.clone()})
    assert verdict.not_finite == ("mask: 1 of 2 elements",)
    assert [fact["outcome"] for fact in seen if fact["kind"] == "verdict"] == ["equal (not finite)"]


@pytest.mark.parametrize(
    "value", [torch.tensor([1, 2]), torch.tensor([True]), torch.ones(0), torch.ones(3)]
)
def test_finite_values_say_nothing(value: torch.Tensor):
    assert compare([value, torch.ones(1)], [value.clone(), torch.ones(1)]).label == "equal"


def test_a_control_that_is_equal_because_of_nan_says_so():
    """V6"""
    sides = [{"out": torch.tensor([math.nan, 1.0])} for _ in range(2)]
    with pytest.raises(ControlFailed, match="because NaN and inf hide what differs"):
        assert_bitwise_different(*sides)
    finite = [{"out": torch.ones(2)} for _ in range(2)]
    with pytest.raises(ControlFailed) as caught:
        assert_bitwise_different(*finite)
    assert "NaN" not in str(caught.value)


def test_a_run_that_repeats_itself_says_so():
    """V6"""
    with facts.collecting() as seen:
        report = assert_run_to_run(
            lambda: torch.tensor([math.nan, 1.0]), runs=2, pressures=PRESSURES[:1]
        )
    assert "not finite   the tensor: 1 of 2 elements, which is equal whatever computes it" in str(
        report
    )
    assert {fact["outcome"] for fact in seen if fact.get("what") == ""} == {"equal (not finite)"}


@pytest.mark.parametrize("phase", ["weight", "optimizer", "buffer", "rng"])
@pytest.mark.parametrize("bad", BAD)
def test_every_phase_names_what_is_not_finite(phase: str, bad: str):
    """V6: the loss beside it is finite."""
    sides = []
    for _ in range(2):
        record = Record()
        record.add(0, 0, "loss", "loss", torch.ones(1))
        record.add(0, 0, phase, "w", torch.tensor([1.0, BAD[bad], 2.0]))
        sides.append(record)
    verdict = compare(*sides)
    assert verdict.label == "equal (not finite)"
    (line,) = verdict.not_finite
    assert line.startswith("step 0, rank 0, ")
    assert line.endswith(" of w: 1 of 3 elements")


@pytest.mark.parametrize(
    ("phase", "outcome"),
    [("weight", "unverified"), ("optimizer", "unverified"), ("buffer", "equal")],
)
def test_a_weight_that_is_nothing_but_nan_proves_nothing(phase: str, outcome: str):
    """V6: a buffer may be a constant, as the bound of a mask."""
    sides = []
    for _ in range(2):
        record = Record()
        record.add(0, 0, "loss", "loss", torch.ones(1))
        record.add(0, 0, phase, "w", torch.full((2,), -math.inf))
        sides.append(record)
    assert compare(*sides).outcome == outcome


def control_run(weight: list[float], drawn: int = 0, names: tuple[str, ...] = ("w",)) -> Record:
    record = Record()
    record.add(0, 0, "rng", "torch.cpu", torch.tensor([drawn]))
    record.add(0, 0, "loss", "loss", torch.ones(1))
    for name in names:
        record.add(0, 0, "weight", name, torch.tensor(weight))
    return record


ONE_SIDE = "the control run differs only where one side is NaN or infinite"
CONTROLS = {
    "NaN for a number": ([math.nan, 1.0], [0.0, 1.0], ONE_SIDE),
    "a number for NaN": ([0.0, 1.0], [math.nan, 1.0], ONE_SIDE),
    "infinite at the end": ([0.0, math.inf], [0.0, 1.0], ONE_SIDE),
    "NaN of other bits": ([math.nan, 1.0], [-math.nan, 1.0], ONE_SIDE),
    "a number beside NaN": ([math.nan, 1.0], [0.0, 2.0], ""),
    "the other sign of zero": ([0.0, 1.0], [-0.0, 1.0], ""),
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.float8_e5m2, torch.complex64, torch.complex128],
    ids=str,
)
@pytest.mark.parametrize("case", CONTROLS)
def test_a_control_has_to_differ_in_finite_numbers(case: str, dtype: torch.dtype):
    """L5: NaN differs whatever goes wrong."""
    actual, expected, complaint = CONTROLS[case]
    sides = [
        {"same": torch.ones(2), "w": torch.tensor(values).to(dtype)}
        for values in (actual, expected)
    ]
    if not complaint:
        assert assert_bitwise_different(*sides).outcome == "different"
        return
    with pytest.raises(ControlFailed, match=complaint):
        assert_bitwise_different(*sides)


def test_one_tensor_that_differs_in_numbers_is_enough():
    sides = [
        {"a": torch.tensor([math.nan]), "b": torch.tensor([1.0])},
        {"a": torch.zeros(1), "b": torch.tensor([2.0])},
    ]
    assert assert_bitwise_different(*sides).outcome == "different"


def test_a_control_that_differs_in_random_states_alone_says_so():
    """L5: any other draw changes them. Where nothing else is compared, they are what is meant."""
    sides = control_run([1.0], drawn=0), control_run([1.0], drawn=1)
    with pytest.raises(ControlFailed, match="the control run differs in random states alone"):
        assert_bitwise_different(*sides)
    assert (
        assert_bitwise_different(control_run([1.0], drawn=0), control_run([2.0], drawn=1)).outcome
        == "different"
    )
    alone = []
    for drawn in range(2):
        record = Record()
        record.add(0, 0, "rng", "torch.cpu", torch.tensor([drawn]))
        alone.append(record)
    assert assert_bitwise_different(*alone).outcome == "different"


def test_on_ranks_such_a_control_counts_as_equal():
    """L5: another rank may differ in numbers; ranks are judged together."""
    with facts.collecting() as seen, facts.watching({"control": lambda **_: None}):
        assert_bitwise_different(
            {"w": torch.tensor([math.nan])}, {"w": torch.ones(1)}, what="swapped"
        )
        assert_bitwise_different({"w": torch.zeros(1)}, {"w": torch.ones(1)}, what="swapped")
    assert [fact["equal"] for fact in seen if fact["kind"] == "control"] == [True, False]


def test_a_control_that_differs_in_the_random_state_of_results_alone():
    """``TracedStep.results`` returns random states under this name."""
    name = "random state of torch.cpu afterwards"
    one, other = (
        {"loss": torch.ones(1), name: torch.tensor([state], dtype=torch.uint8)} for state in (1, 2)
    )
    with pytest.raises(ControlFailed, match="the control run differs in random states alone"):
        assert_bitwise_different(one, other)
    other["loss"] = torch.zeros(1)
    assert_bitwise_different(one, other)


def control_of(*changed: tuple[str, float], rng: int = 0) -> Record:
    """A run of one step; ``changed`` are elements by phase, and ``rng`` is a random state."""
    record = Record()
    for phase in ("loss", "gradient"):
        record.add(0, 0, phase, "loss" if phase == "loss" else "w", torch.ones(3))
    for phase, value in changed:
        record[0, 0, phase, "loss" if phase == "loss" else "w"][1] = value
    record.add(0, 0, "rng", "torch.cpu", torch.tensor([rng], dtype=torch.uint8))
    return record


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize(
    ("control", "outcome"),
    [
        (control_of(), "equal"),
        (control_of(("gradient", 2.0)), "different"),
        (control_of(("gradient", 2.0), ("loss", math.nan), rng=1), "different"),
        (control_of(("gradient", math.nan)), "unverified"),
        (control_of(("gradient", math.inf), ("loss", math.nan), rng=1), "unverified"),
        (control_of(rng=1), "unverified"),
    ],
)
def test_a_control_proves_nothing_by_nan_or_a_random_state_alone(control, outcome, selects):
    """V6: nor if a step is selected of both records."""
    sides = [control, control_of()]
    if selects:
        sides = [side.select(step=0) for side in sides]
    verdict = compare_control(*sides)
    assert verdict.outcome == outcome
    assert bool(verdict.reasons) == (outcome == "unverified")
    if outcome == "different":
        assert_bitwise_different(*sides)
    else:
        with pytest.raises(ControlFailed):
            assert_bitwise_different(*sides)


def test_what_is_selected_keeps_its_places():
    """V1: messages say step, rank and phase, as of whole records."""
    verdict = compare(control_of(("gradient", 2.0)).select(step=0), control_of().select(step=0))
    assert "first at step 0, rank 0, gradient of w, element (1)" in str(verdict)
    assert verdict.origin == (0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_elements_that_are_not_finite_are_counted_wherever_they_stand(dtype: torch.dtype):
    """The quick look at the least and the largest element sees every place of a vector."""
    for size in (1, 7, 16, 33):
        for value in BAD.values():
            for place in range(size):
                row = torch.linspace(-2, 2, size, dtype=torch.float32).to(dtype)
                assert count_not_finite(row) == 0
                row[place] = value
                assert count_not_finite(row) == 1, (size, value, place)


def test_counting_what_is_not_finite_takes_any_dtype_and_no_element():
    twice = [complex(1, math.nan), complex(-math.inf, 0), complex(1, 2)]
    assert count_not_finite(torch.tensor(twice)) == 2
    assert count_not_finite(torch.tensor([1, math.nan, math.inf]).to(torch.float8_e5m2)) == 2
    assert count_not_finite(torch.ones(2).to(torch.float8_e5m2)) == 0
    assert count_not_finite(torch.empty(0, 3)) == 0
    assert count_not_finite(torch.arange(3)) == 0
