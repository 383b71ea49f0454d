"""Each sentence of a comparison, from records that are written by hand."""

import argparse
import itertools
import json
import struct
import zlib

import hypothesis
import hypothesis.strategies as st
import pytest

from pytest_gtrainer.over_time import commands
from pytest_gtrainer.over_time.arguments import add_commands
from pytest_gtrainer.over_time.comparing import Difference, _runs_of, compare_runs, whole_of
from pytest_gtrainer.over_time.files import FORMAT, VERSION, Entry, RecordError, read_run


def number(value):
    """The entry of a tensor without dimensions."""
    return [float(value), "f32"]


def tensor(value, dtype="f32", shape=(2, 3), part=None):
    return [f"{value:016x}", dtype, list(shape), part]


def shard(value, offset, rows=1):
    return tensor(value, part=[[offset, 0], [rows, 3]])


def record(folder, *ranks, first=0, places=None, ends=None, header=None, world=None):
    """Write a record. Each rank is a list of steps, and a step a dict of phases."""
    folder.mkdir()
    for rank, steps in enumerate(ranks):
        lines = [{"format": FORMAT, "version": VERSION, "world_size": world or len(ranks)}]
        lines[0] |= header or {}
        for place, phases in enumerate(steps):
            line = {"step": first + place, "phases": phases}
            if places:
                line["places"] = places[place]
            lines.append(line)
        if ends is None or ends[rank] is not None:
            lines.append({"end": ends[rank] if ends else ""})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank{rank}.jsonl").write_text(text)
    return read_run(folder)


def found(a, b, **how):
    """The lines of a comparison, without its first two, which name the records."""
    result = compare_runs(a, b, **how)
    lines = list(result.lines())
    assert str(result).splitlines() == lines
    first = any(line.startswith("first difference: ") for line in lines)
    assert first == bool(result.differences)
    return lines[2:]


def steps(*losses, **phases):
    """Steps with these losses, and in each the same other phases."""
    return [{"loss": {"root": number(loss)}} | phases for loss in losses]


@pytest.fixture
def compared(tmp_path):
    """Return the lines of a comparison of two records, each a list of steps for each rank."""
    counts = itertools.count()

    def compare(a, b, a_how=None, b_how=None, **how):
        folder = tmp_path / str(next(counts))
        folder.mkdir()
        sides = record(folder / "a", *a, **a_how or {}), record(folder / "b", *b, **b_how or {})
        return found(*sides, **how)

    return compare


def test_heads_name_folder_ranks_and_steps(tmp_path):
    a = record(tmp_path / "a", steps(1, 2), steps(1, 2))
    b = record(tmp_path / "b", steps(1, 2, 3), first=0)
    assert list(compare_runs(a, b).lines())[:2] == [
        f"A: {tmp_path}/a, 2 ranks, steps 0 to 1",
        f"B: {tmp_path}/b, 1 rank, steps 0 to 2",
    ]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((1,), ", rank 1"),
        ((0, 3), ", ranks 0, 3"),
        (tuple(range(9)), ", ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
        ((), ""),
    ],
)
def test_a_difference_names_its_ranks(ranks, words):
    assert str(Difference(2, "clip", "a\nb", ranks, "1 in A,\t2 in B")) == (
        f"step 2, clip: a\\nb{words}: 1 in A,\\t2 in B"
    )
    assert str(Difference(2, "clip", "w", ranks)) == f"step 2, clip: w{words}"


def test_ranks_that_differ_and_the_table_of_the_step(compared):
    """Later steps follow from the first one that differs, and are not counted."""
    equal = {"optimiser": {"w": tensor(1), "v": tensor(2)}}
    a = [steps(1, 2, 3, **equal) for _ in range(4)]
    b = [steps(1, 9 if rank % 2 else 2, 9, **equal) for rank in range(4)]
    for rank in b:
        rank[2] = rank[2] | {"optimiser": {"w": tensor(8), "v": tensor(9)}}
    assert compared(a, b) == [
        "first difference: step 1, loss: root, ranks 1, 3: 2.0 in A, 9.0 in B",
        "  losses are at most 0.7 apart in 3 steps",
        "step 1 in all, entries that differ: loss 1 of 1, optimiser 0 of 2",
    ]
    assert compared(a, a) == ["equal: 9 values in 3 steps"]


@pytest.mark.parametrize(
    ("losses", "line"),
    [
        ([4.0, 4.5, 2.0], "losses are at most 0.6 apart in 3 steps"),
        # A mistake begins at step 2, in a run that is rounded otherwise from its start on.
        (
            [2.000001, 2.000002, 2.5, 4.0],
            "losses are at most 1e-06 apart up to step 1, and 0.2 at step 2",
        ),
        ([2.000001, 3.0], "losses are at most 5e-07 apart up to step 0, and 0.3 at step 1"),
        ([0.0, 0.5], "losses are at most 1 apart in 2 steps"),
        ([4.0, float("nan"), 2.0], "losses are at most 0.5 apart in 2 steps"),
        ([4.0], ""),
    ],
)
def test_where_losses_part_is_said_behind_the_first_rounding(compared, losses, line):
    a = [steps(*(2.0 for _ in losses), gradient={"w": tensor(1)})]
    b = [steps(*losses, gradient={"w": tensor(1)})]
    found = [each.strip() for each in compared(a, b) if "apart" in each]
    assert found == [line] * bool(line)
    assert not any("apart" in each for each in compared(a, a))


def test_what_one_side_lacks(compared):
    a = [[{"gradient": {"v": tensor(1), "w": tensor(2)}, "clip": {"w": tensor(3)}}]]
    b = [[{"gradient": {"w": tensor(2)}, "clip": {"w": tensor(4)}}]]
    for sides, letter in (((a, b), "A"), ((b, a), "B")):
        assert compared(*sides) == [
            f"first difference: step 0, gradient: v: only in {letter}",
            "step 0 in all, entries that differ: gradient 1 of 2, clip 1 of 1",
        ]


def test_values_of_a_tensor_have_no_words_and_other_types_do(compared):
    def gradients(*entries):
        return [[{"gradient": dict(zip("abcd", entries, strict=False))}]]

    a = gradients(tensor(1), tensor(1), number(1), 0.5)
    b = gradients(tensor(2), tensor(1, "bf16"), [1.0, "f64"], number(0.5))
    assert compared(a, b) == [
        "first difference: step 0, gradient: a, rank 0",
        "  step 0, gradient: b, rank 0: f32[2, 3] in A, bf16[2, 3] in B",
        "  step 0, gradient: c, rank 0: f32[] in A, f64[] in B",
        "  step 0, gradient: d, rank 0: 0.5 in A, 0.5 as f32[] in B",
        "step 0 in all, entries that differ: gradient 4 of 4",
    ]


def test_other_shapes_name_those_of_the_ranks_that_differ(compared):
    def gradients(*shapes):
        return [[{"gradient": {"w": tensor(1, shape=shape)}}] for shape in shapes]

    a = gradients((2, 3), (2, 3), (4, 3), (2, 3))
    b = gradients((2, 3), (5, 3), (6, 3), (2, 3))
    assert compared(a, b)[0] == (
        "first difference: step 0, gradient: w, ranks 1, 2: "
        "f32[2, 3], f32[4, 3] in A, f32[5, 3], f32[6, 3] in B"
    )
    fewer = gradients((5, 3), (5, 3))
    assert compared(a, fewer)[1] == (
        "first difference: step 0, gradient: w, ranks 0, 1, 2, 3: "
        "f32[2, 3], f32[4, 3] in A, f32[5, 3] in B"
    )


def test_eight_differences_are_shown_unless_all_are_asked_for(tmp_path):
    def gradients(value, names):
        return [{"gradient": {f"w{name}": tensor(value) for name in names}}]

    for count, left in ((8, None), (9, "1 more difference"), (12, "4 more differences")):
        a = record(tmp_path / f"a{count}", gradients(1, range(count)))
        b = record(tmp_path / f"b{count}", gradients(2, range(count)))
        result = compare_runs(a, b)
        rows = [f"  step 0, gradient: w{name}, rank 0" for name in range(1, count)]
        more = [f"  and {left} in this phase: --all"] if left else []
        last = f"step 0 in all, entries that differ: gradient {count} of {count}"
        assert list(result.lines(option="--all"))[3:] == [*rows[:7], *more, last]
        assert list(result.lines(has_all=True))[3:] == [*rows, last]


def test_a_failure_in_a_test_names_no_option_of_the_command(tmp_path):
    a = record(tmp_path / "a", [{"gradient": {f"w{name}": tensor(1) for name in range(12)}}])
    b = record(tmp_path / "b", [{"gradient": {f"w{name}": tensor(2) for name in range(12)}}])
    text = str(compare_runs(a, b))
    assert "  and 4 more differences in this phase\n" in text
    assert "--all" not in text


def test_moments_of_a_parameter_are_one_line(compared):
    """With the parameter if it differs, too; apart where ranks or words are others."""

    def optimiser(value):
        entries = {"a": tensor(value), "0.w": tensor(value)}
        entries |= {f"0.w.{key}": tensor(value) for key in ("step", "exp_avg", "exp_avg_sq")}
        entries |= {"0.b": tensor(1), "0.b.exp_avg": tensor(value), "0.b.sum": tensor(value)}
        entries |= {"0.v": tensor(1), "0.v.exp_avg": tensor(value), "norm.w": tensor(value)}
        entries |= {"norm.b": tensor(value), "norm.b.sum": tensor(1, f"f{32 * value}")}
        return [[{"optimiser": entries}]]

    assert compared(optimiser(1), optimiser(2)) == [
        "first difference: step 0, optimiser: a, rank 0",
        "  step 0, optimiser: 0.w and its step, exp_avg, exp_avg_sq, rank 0",
        "  step 0, optimiser: exp_avg, sum of 0.b, rank 0",
        "  step 0, optimiser: 0.v.exp_avg, rank 0",
        "  step 0, optimiser: norm.w, rank 0",
        "  step 0, optimiser: norm.b, rank 0",
        "  step 0, optimiser: norm.b.sum, rank 0: f32[2, 3] in A, f64[2, 3] in B",
        "step 0 in all, entries that differ: optimiser 11 of 13",
    ]


def test_the_page_in_markdown_as_a_whole(tmp_path):
    places = [{"backward": "a.py:1", "step": "a.py:2"}]
    for name, value in (("a", 1), ("b", 2)):
        step = {"loss": {"root": number(value)}, "clip": {"w": tensor(value), "v": tensor(0)}}
        record(tmp_path / name, [step], places=places)
    runs = read_run(tmp_path / "a"), read_run(tmp_path / "b")
    assert list(compare_runs(*runs).lines(markdown=True)) == [
        f"- A: {tmp_path}/a, 1 rank, steps 0 to 0",
        f"- B: {tmp_path}/b, 1 rank, steps 0 to 0",
        "",
        "**first difference: step 0, loss: root, rank 0: 1.0 in A, 2.0 in B**",
        "- backward at a.py:1, step at a.py:2",
        "",
        "| phase of step 0 | differ | of |",
        "|---|---|---|",
        "| loss | 1 | 1 |",
        "| clip | 1 | 2 |",
    ]


@pytest.mark.parametrize(
    ("phase", "is_said"),
    [
        ("load", False),
        ("data", False),
        ("forward", False),
        ("loss", True),
        ("gradient", True),
        ("clip", True),
        ("optimiser", True),
    ],
)
def test_calls_of_the_trainer_are_named_where_a_phase_lies_between_them(compared, phase, is_said):
    sides = [[[{phase: {"w": tensor(0)}}, {phase: {"w": tensor(value)}}]] for value in (1, 2)]
    own = {"backward": "a.py:1", "step": "a.py:2"}
    others = {"backward": "b.py:8", "step": "b.py:9"}
    for a, b, lines in (
        (own, own, ["  backward at a.py:1, step at a.py:2"]),
        (
            own,
            others,
            ["  A: backward at a.py:1, step at a.py:2", "  B: backward at b.py:8, step at b.py:9"],
        ),
        ({"step": "a.py:2"}, {}, ["  A: step at a.py:2"]),
        ({}, {"backward": "b.py:8"}, ["  B: backward at b.py:8"]),
        ({}, {}, []),
    ):
        said = compared(*sides, {"places": [others, a]}, {"places": [own, b], "first": 4}, at=0)
        assert said[1:-1] == lines * is_said


LATER = {  # what a run does otherwise at a later step, and the name that stands for it
    "a rate": ({"optimiser": {"w": tensor(1), "param_groups.0.lr": 0.5}}, "param_groups.0.lr"),
    "data": ({"data": {"input [0]": tensor(9)}}, "data: input [0]"),
    "a random state": ({"random": {"torch.cpu": tensor(9)}}, "random: torch.cpu"),
}


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("kind", LATER)
def test_what_rounding_seldom_moves_is_named_after_a_loss_that_does(compared, kind, step):
    """Compiled and eager code part at the first step, and a wrong schedule only shows later."""
    change, name = LATER[kind]

    def run(loss, changed):
        made = []
        for place in range(4):
            phases = {
                "random": {"torch.cpu": tensor(place)},
                "data": {"input [0]": tensor(place)},
                "loss": {"root": {"calls": [number(loss)]}},
                "optimiser": {"w": tensor(loss), "param_groups.0.lr": 0.25},
            }
            made.append(phases | (change if changed and place >= step else {}))
        return made

    said = compared([run(1, False)], [run(2, True)])
    words = [line for line in said if "what rounding seldom moves differs, too: " in line]
    if step == 0 and kind != "a rate":
        assert not words  # it is the first difference itself
        assert name in said[0]
    else:
        (line,) = words
        assert f"too: step {step}, " in line
        assert name in line
        assert "step 0, loss: root" in said[0]
    assert "seldom" not in "".join(compared([run(1, False)], [run(2, False)]))


def test_steps_are_counted_that_only_one_side_has(compared):
    a = compared([steps(*range(5))], [steps(2, 3)], b_how={"first": 2})
    assert a == [
        "only in A: 3 steps, 0 to 1, 4",
        "equal: 2 values in 2 steps; 3 steps compared with nothing",
        "not equal to the end: B ends after step 3, and A after 4",
    ]
    both = compared([steps(*range(5))], [steps(4, 5, 6)], b_how={"first": 4})
    assert both == [
        "only in A: 4 steps, 0 to 3",
        "only in B: 2 steps, 5 to 6",
        "equal: 1 value in 1 step; 6 steps compared with nothing",
        "not equal to the end: A ends after step 4, and B after 6",
    ]


def test_steps_of_b_are_counted_from_the_one_that_is_named(tmp_path):
    a, b = record(tmp_path / "a", steps(*range(5))), record(tmp_path / "b", steps(2, 3), first=7)
    assert compare_runs(a, b, at=2).steps == [2, 3]
    assert compare_runs(a, b, at=2).status == 0
    assert compare_runs(a, b, at=1).status == 1
    with pytest.raises(RecordError, match="in both records: 0 to 4 in A, 7 to 8 in B"):
        compare_runs(a, b)


@hypothesis.given(st.sets(st.integers(0, 30), max_size=15))
@hypothesis.example({3})
@hypothesis.settings(deadline=None)
def test_runs_of_numbers_name_each_number_once(numbers):
    named = []
    words, _, more = _runs_of(numbers).partition(" and ")
    spans = words.split(", ") if words else []
    for span in spans:
        first, _, last = span.partition(" to ")
        named.append(range(int(first), int(last or first) + 1))
    assert not more or len(spans) == 8
    assert len(spans) <= 8
    listed = [each for span in named for each in span]
    assert listed == sorted(numbers)[: len(listed)]
    assert more or len(listed) == len(numbers)
    assert all(one.stop < other.start for one, other in itertools.pairwise(named))


def test_phases_of_one_side_are_said_in_the_order_of_a_step(compared):
    a = [steps(1, data={"x": tensor(1)}, optimiser={"w": tensor(1)}, random={"torch": tensor(1)})]
    b = [steps(1, forward={"0": tensor(1)}, optimiser={"w": tensor(1)})]
    assert compared(a, b) == [
        "not compared: random, which only A has",
        "not compared: data, which only A has",
        "not compared: forward, which only B has",
        "equal: 2 values in 1 step",
    ]


def test_records_that_were_cut_are_said_by_their_letter(compared):
    a, b = [steps(1, 2), steps(1, 2)], [steps(1), steps(1)]
    ends = {"a_how": {"ends": ["", "KeyError"]}, "b_how": {"ends": [None, ""], "world": 5}}
    assert compared(a, b, **ends) == [
        "other world_size: 2 in A, 5 in B",
        "A: rank 1 ended after step 1 by KeyError",
        "B: rank 0 was cut after step 0: its last line is missing",
        "B: of 5 ranks, 3 left no file",
        "only in A: 1 step, 1",
        "equal: 1 value in 1 step; 1 step compared with nothing",
    ]


@pytest.mark.parametrize("name", ["python", "numpy"])
def test_a_generator_that_nobody_seeds_is_said_and_one_that_parts_later_differs(compared, name):
    def states(*values):
        return [[{"random": {name: tensor(each), "torch": tensor(0)}} for each in values]]

    assert compared(states(1, 2), states(3, 4)) == [
        f"random states that differ from the start, as they do unless both seed them: {name}",
        "equal: 4 values in 2 steps",
    ]
    assert compared(states(1, 2), states(1, 4))[0] == (
        f"first difference: step 1, random: {name}, rank 0"
    )
    assert compared(states(1, 2), states(3, 2), at=0)[-1] == "equal: 4 values in 2 steps"


@pytest.mark.parametrize("name", ["torch", "torch.cuda"])
def test_generators_of_torch_are_compared_from_the_start(compared, name):
    a, b = ([[{"random": {name: tensor(value)}}]] for value in (1, 2))
    assert compared(a, b)[0] == f"first difference: step 0, random: {name}, rank 0"


def test_options_of_an_implementation_are_said_and_others_differ(compared):
    def options(group, **values):
        named = {f"param_groups.{group}.{name}": value for name, value in values.items()}
        return [[{"optimiser": named | {"w.fused": tensor(1)}}]]

    a = options(1, fused=False, foreach=False, capturable=False, lr=1.0)
    b = options(1, fused=True, foreach=True, capturable=True, lr=1.0)
    names = ", ".join(f"param_groups.1.{name}" for name in ("capturable", "foreach", "fused"))
    assert compared(a, b) == [
        f"options of an implementation that differ: {names}",
        "equal: 5 values in 1 step",
    ]
    assert compared(a, options(1, fused=False, foreach=False, capturable=False, lr=2.0))[0] == (
        "first difference: step 0, optimiser: param_groups.1.lr, rank 0: 1.0 in A, 2.0 in B"
    )
    other = [[{"optimiser": a[0][0]["optimiser"] | {"w.fused": tensor(2)}}]]
    assert compared(a, other)[0] == "first difference: step 0, optimiser: w.fused, rank 0"


def test_what_could_not_be_recorded_is_said_by_phase_and_name(compared):
    reason = "not recorded: no values"
    a = [[{"gradient": {"w": reason, "v": tensor(1)}, "clip": {"w": reason}}]]
    assert compared(a, a) == [
        "not compared, because it was not recorded: clip: w, gradient: w",
        "equal: 1 value in 1 step",
    ]


def test_prefixes_of_wrappers_are_taken_away_on_the_side_that_has_them(compared):
    plain = [steps(1, clip={"a.w": tensor(1), "b.w": tensor(2)})]
    wrapped = [steps(1, clip={"module.a.w": tensor(1), "module.b.w": tensor(2)})]
    for sides, letter in (((wrapped, plain), "A"), ((plain, wrapped), "B")):
        assert compared(*sides) == [
            f"names of {letter} without the prefixes of wrappers, as of module.a.w",
            "equal: 3 values in 1 step",
        ]
    # Wrapped behind the first step.
    assert compared([plain[0] * 2], [plain[0] + wrapped[0]])[0].startswith("names of B without")


def test_names_that_would_become_one_stay_as_they_are(compared):
    both = {"w": tensor(1), "module.w": tensor(2)}
    assert compared([steps(1, clip=both)], [steps(1, clip=both)]) == ["equal: 3 values in 1 step"]
    said = compared([steps(1, 1, clip=both)], [steps(1, 1, clip={"w": tensor(1)})])
    assert said[0] == "first difference: step 0, clip: module.w: only in A"
    # Also in phases that have one of both.
    sides = [[steps(1, clip=both, gradient={name: tensor(1)})] for name in ("module.w", "w")]
    assert compared(*sides)[0] == "first difference: step 0, gradient: module.w: only in A"


@pytest.mark.parametrize("only", ["", "A", "B"])
def test_other_models_are_refused_unless_a_side_has_no_tensor(compared, only):
    """Options of optimisers have the same names in every run."""
    names = {"A": {"a.w": tensor(1)}, "B": {"b.w": tensor(1)}}
    sides = []
    for letter in "AB":
        own = names[letter] if only in ("", letter) else {}
        sides.append([steps(1, optimiser={"param_groups.0.lr": 0.5, **own})])
    if only:
        assert compared(*sides)[0].endswith(f" only in {only}")
        return
    words = "no name of a tensor is in both, a.w in A and b.w in B"
    with pytest.raises(RecordError, match=f"^the records are of different models: {words}$"):
        compared(*sides)


def test_optimisers_that_step_in_turn_are_of_one_model(compared):
    """Run B ends a step earlier, at the step of the other optimiser."""
    turns = ({"a.w": tensor(1)}, {"b.w": tensor(2)})
    run = []
    for number in range(6):
        run += steps(1, optimiser=turns[number % 2])
    said = compared([run], [run[:5]])
    assert said == [
        "only in A: 1 step, 5",
        "equal: 10 values in 5 steps; 1 step compared with nothing",
        "not equal to the end: B ends after step 4, and A after 5",
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "every", "says"),
    [
        (5, 6, 1, "A ends after step 4, and B after 5"),
        (6, 4, 1, "B ends after step 3, and A after 5"),
        (5, 6, 2, ""),  # of every second step, step 6 would be the next one
        (5, 7, 2, "A ends after step 4, and B after 6"),
        (6, 6, 1, ""),
    ],
)
def test_a_run_that_ends_before_the_other_is_not_equal(tmp_path, capsys, ours, theirs, every, says):
    """As by data that run out, or by an early stop. A run that begins later is one that resumes."""
    header = {"every": every}
    record(tmp_path / "a", steps(*range(ours)), header=header)
    record(tmp_path / "b", steps(*range(2, theirs)), first=2, header=header)
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(dest="command"))
    given = parser.parse_args(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert commands.run(given) == int(bool(says))
    said = capsys.readouterr().out.splitlines()
    assert said[-1].removeprefix("not equal to the end: ") == (says or said[-1])
    assert bool(says) == said[-1].startswith("not equal to the end: ")


def loading(value):
    """The first step of a run that begins with this weight, and adds one to it."""
    return {"load": {"w": tensor(value)}, "optimiser": {"w": tensor(value + 1), **OPTIONS}}


def going_on(value):
    return {"load": {"beside ema.w": tensor(0)}, "optimiser": {"w": tensor(value + 1), **OPTIONS}}


# The average is what it is when the step begins, not what an optimiser has left of it.
OPTIONS = {"param_groups.0.lr": 0.5, "beside ema.w": tensor(7)}


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("loaded", [0, 1, 2])
def test_a_side_that_loads_is_compared_with_what_the_other_one_has_left(compared, side, loaded):
    """The weights of step 0 are what step 1 begins with; options are no state."""
    whole = [[{**loading(0), "load": {"w": tensor(0), "beside ema.w": tensor(0)}}, going_on(1)]]
    resumed = loading(loaded)
    resumed["load"] |= {"beside ema.w": tensor(0)}
    resumed["optimiser"] = going_on(1)["optimiser"]
    sides, how = (whole, [[resumed]]), {"b_how": {"first": 1}}
    if side == "A":
        sides, how = ([[resumed]], whole), {"a_how": {"first": 1}}
    said = compared(*sides, **how)
    if loaded == 1:
        assert said[1] == "equal: 5 values in 1 step; 1 step compared with nothing"
    else:
        assert said[1] == "first difference: step 1, load: w, rank 0"
    resumed["load"] = {"more": tensor(5), **resumed["load"]}
    said = compared(*sides, **how)
    assert f"step 1, load: more: only in {side}" in "\n".join(said)


def test_both_sides_that_load_are_compared_as_they_are(compared):
    a, b = [[loading(0), loading(1)]], [[loading(0), loading(3)]]
    assert compared(a, b)[0] == "first difference: step 1, load: w, rank 0"
    b[0][1]["load"] = {"w": tensor(1), "v": tensor(1)}
    assert compared(a, b)[0] == "first difference: step 1, load: v: only in B"


@pytest.mark.parametrize("entry", ["0.w", "0.w.exp_avg"])
def test_a_rank_that_trains_a_weight_has_its_gradient_and_moments(compared, entry):
    def rank(has_it, trains=True):
        own = {entry: tensor(1)} if has_it else {}
        weights = {"0.w": tensor(1)} if trains else {"v": tensor(1)}
        return [{"gradient": {"all": tensor(0), **own}, "optimiser": weights}]

    whole, lost = [rank(True)] * 3, [rank(True), rank(False), rank(False)]
    for sides, letter in (((whole, lost), "A"), ((lost, whole), "B")):
        assert compared(*sides)[0] == (
            f"first difference: step 0, gradient: {entry}, ranks 1, 2: only in {letter}"
        )
    # Stages of a pipeline lie on other ranks in another layout.
    first, last = rank(True), rank(False, trains=False)
    assert compared([first, last], [last, first])[0].startswith("equal: ")


def test_shards_on_other_ranks_are_added_up(compared):
    def gradients(*entries):
        return [[{"gradient": {"w": entry}}] for entry in entries]

    whole, worlds = gradients(tensor(7)), "other world_size: 1 in A, 2 in B"
    assert compared(whole, gradients(shard(3, 0), shard(4, 1))) == [
        worlds,
        "equal: 1 value in 1 step",
    ]
    assert compared(whole, gradients(shard(3, 0), shard(5, 1)))[1] == (
        "first difference: step 0, gradient: w: in all, on ranks or calls that are others"
    )
    own = gradients(tensor(3, part="partial"), tensor(4, part="partial"))
    with pytest.raises(RecordError, match="no value of one record is compared with one"):
        compared(whole, own)
    said = compared([steps(1, **whole[0][0])], [steps(1, **each[0]) for each in own])
    reason = "because each rank has its own and the ranks are others"
    assert said == [
        worlds,
        f"not compared, {reason}: gradient: w",
        "equal: 1 value in 1 step",
    ]


def test_sums_that_round_otherwise_are_not_compared(compared):
    def step(value):
        tensors = {"load": {"w": tensor(0)}, "random": {"torch": tensor(0)}}
        tensors |= {"data": {"x": tensor(0)}, "forward": {"0": tensor(value)}}
        tensors |= {name: {"w": tensor(value)} for name in ("loss", "gradient", "clip")}
        return tensors | {"optimiser": {"w": tensor(value), "param_groups.0.lr": 0.5}}

    later = {**step(3), "load": {"w": tensor(3)}}
    said = compared([[step(1), step(1)]], [[step(2), later]], rounds=True)
    names = "clip, forward, gradient and 3 more"
    reason = "because it is rounded otherwise on other ranks"
    assert said == [f"not compared, {reason}: {names}", "equal: 7 values in 2 steps"]
    for phase, name in (("load", "w"), ("random", "torch"), ("data", "x")):
        other = step(2)
        other[phase] = {name: tensor(9)}
        said = compared([[step(1), step(1)]], [[other, later]], rounds=True)
        assert f"first difference: step 0, {phase}: {name}, rank 0" in said
    rate = step(2)
    rate["optimiser"] = {"w": tensor(2), "param_groups.0.lr": 0.25}
    assert (
        "first difference: step 0, optimiser: param_groups.0.lr, rank 0: 0.5 in A, 0.25 in B"
        in compared([[step(1)]], [[rate]], rounds=True)
    )


def with_values(folder, *ranks):
    """A record of one step in which each rank has these gradients, with their bytes."""
    steps = []
    for tensors in ranks:
        entries, content = {}, b""
        for name, numbers in tensors.items():
            own = struct.pack(f"<{len(numbers)}f", *numbers)
            fingerprint = zlib.crc32(own)
            entries[name] = [f"{fingerprint:016x}", "f32", [len(numbers)], None]
            entries[name].append([len(content), len(own)])
            content += own
        steps.append([{"gradient": entries}])
    run = record(folder, *steps)
    for rank, tensors in enumerate(ranks):
        content = b"".join(struct.pack(f"<{len(each)}f", *each) for each in tensors.values())
        (folder / f"rank{rank}.values").write_bytes(content)
    return run


def test_the_first_element_is_that_of_the_first_rank_that_differs(tmp_path):
    a = with_values(tmp_path / "a", {"w": [0, 0, 0]}, {"w": [1, 2, 3]}, {"w": [4, 5, 6]})
    b = with_values(tmp_path / "b", {"w": [0, 0, 0]}, {"w": [1, 7, 8]}, {"w": [9, 5, 6]})
    result = compare_runs(a, b)
    assert result.element == ["  element [1]: 2 in A, 7 in B; 2 of 3 elements of rank 1 differ"]


def test_the_largest_changes_come_first_in_norms_of_a(tmp_path):
    sizes = [5, 1, 7, 3, 9, 2, 8, 4, 6]
    a = with_values(tmp_path / "a", {f"w{size}": [2, 0] for size in sizes})
    b = with_values(tmp_path / "b", {f"w{size}": [2, size] for size in sizes})
    assert compare_runs(a, b).sizes == [
        "changes in norms of A, the largest: "
        + ", ".join(f"w{size} {size / 2:.2g}" for size in range(9, 1, -1))
    ]
    c = with_values(tmp_path / "c", {"zero": [0, 0], "nan": [1, 1], "twice": [1, 3]})
    d = with_values(tmp_path / "d", {"zero": [1, 0], "nan": [1, float("nan")], "twice": [2, 6]})
    assert compare_runs(c, d).sizes == ["B is 2 times A: 1 tensor, twice"]


def test_rows_and_a_batch_of_more_rows_are_no_whole():
    def rows(*numbers):
        return Entry(numbers, "i64", (len(numbers), 2), "rows")

    large = Entry(("ff",), "i64", (2000, 2))
    both = {rank: [rows("a", "b"), large] for rank in range(2)}
    assert whole_of(both) == [(("a", "b"), (2, 2)), (("ff",), (2000, 2))]
    assert whole_of({0: [rows("a"), large], 1: [rows("b"), large]}) is None


def test_moments_in_lists_have_whole_names(compared):
    """State may have other depths, as that of preconditioners."""

    def optimiser(value):
        entries = {"a": tensor(value)}
        for name in ("0.w.step", "0.w.pre.0", "0.w.pre.1", "0.b", "0.b.pre.0", "0.b.pre.1"):
            entries[name] = tensor(value)
        return [[{"optimiser": entries | {"0.w": tensor(1), "0.b.step": tensor(1)}}]]

    lines = compared(optimiser(1), optimiser(2))
    assert lines[1:3] == [
        "  step 0, optimiser: step, pre.0, pre.1 of 0.w, rank 0",
        "  step 0, optimiser: 0.b and its pre.0, pre.1, rank 0",
    ]
