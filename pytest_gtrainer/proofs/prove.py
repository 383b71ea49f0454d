"""Prove which kind of equal two programs are."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.foreign_graphs import ExportedProgram
from pytest_gtrainer.arithmetic.base import FEW, MOST_RIVALS, Arithmetic
from pytest_gtrainer.arithmetic.field import Field, FieldWithExponents
from pytest_gtrainer.arithmetic.numbers import Numbers, numbers_of
from pytest_gtrainer.arithmetic.prime import P, Prime
from pytest_gtrainer.arithmetic.terms import Terms
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.facts import long_work
from pytest_gtrainer.graph.collectives import launches, unread_launches
from pytest_gtrainer.graph.foreign import adopt
from pytest_gtrainer.graph.nodes import AFTERWARDS
from pytest_gtrainer.graph.same_on_ranks import nodes_within
from pytest_gtrainer.numerics.bits import as_integers
from pytest_gtrainer.proofs.alike import OneRankForAll, differ_only_in_floats
from pytest_gtrainer.proofs.in_numbers import (
    Difference,
    agreement,
    contradiction,
    difference,
    largest,
    says_unchecked,
)
from pytest_gtrainer.proofs.inputs import describe_integers, draw_inputs
from pytest_gtrainer.proofs.on_ranks import GraphOnRanks
from pytest_gtrainer.proofs.origin import AllElements, Trail
from pytest_gtrainer.proofs.programs import (
    FunctionProgram,
    GraphProgram,
    Key,
    Made,
    Program,
    Run,
)
from pytest_gtrainer.proofs.proof import KINDS, AnotherFunction, Place, Proof
from pytest_gtrainer.proofs.structure import prove_by_structure
from pytest_gtrainer.worlds.simulate import AnyWorld, net_of_any
from pytest_gtrainer.worlds.spec import World

_ARITHMETICS: Mapping[str, Sequence[Callable[[], Arithmetic]]] = {
    "identical": [lambda: Terms(strict=True)],
    "other kernels": [lambda: Terms(strict=False)],
    "reordered": [
        lambda: Field(casts="opaque"),
        lambda: FieldWithExponents(casts="opaque"),
        lambda: FieldWithExponents(casts="opaque", orders_softmax=False),
    ],
    "rounds elsewhere": [
        lambda: Field(casts="identity"),
        lambda: FieldWithExponents(casts="identity"),
        lambda: FieldWithExponents(casts="identity", orders_softmax=False),
        lambda: FieldWithExponents(casts="identity", keeps_digits=True),
    ],
}
"""By kind of equal, arithmetics of which one has to find it. The first says where it is not."""


def _may_find_more(arithmetic: Arithmetic, first: Sequence[Run]) -> bool:
    """Return whether an arithmetic may find programs equal that differ in the first one."""
    others = [run.arithmetic for run in first]
    if arithmetic.keeps_digits:
        return any(each.has_digits for each in others)
    if isinstance(arithmetic, Field) and not arithmetic.orders_softmax:
        # Each order is possible, so programs that are equal in another one are equal. A softmax
        # that is written by hand is torch's where neither has the order of its operand.
        return any(isinstance(each, Field) and each.has_softmax for each in others)
    # Without exp, log and roots the other field is the same.
    return any(each.exponentials or each.roots for each in others)


_IN_ORDER = ("identical", "other kernels")
"""Kinds that depend on the order in which ranks add."""


def prove(
    actual: Any,
    expected: Any,
    *,
    inputs: Any = None,
    world: AnyWorld | None = None,
    at_least: str = "rounds elsewhere",
) -> Proof:
    """Return which kind of equal two programs are, for any numbers.

    Both run in other arithmetics, the strictest first: terms, where an element is a fingerprint of
    the expression that makes it, then a field, where it is a number modulo a prime. Outputs are
    compared, gradients that are left in ``grad``, and what is written to inputs.

    Args:
        actual, expected: graphs of any tracer, ``TracedStep``s, recorded passes, or callables.
            They take the same inputs in the same order.
        inputs: of one call. Floating-point tensors become abstract, and parameters of modules;
            integers and bools stay what they are. In a world a function of the rank, or one entry
            a rank. By default drawn for a graph: integers below the extents that they index.
        world: a simulated ``World``, a ``Net``, or a number of ranks, for graphs with collectives.
            They add in its order. In a ranks ``World`` every rank calls this, with its own inputs;
            only "reordered" and weaker kinds can be found.
        at_least: do not look for weaker kinds of equal than this one.

    Raises:
        ValueError: no inputs for callables, an input that nobody can make up, collectives without
            a world, or a world for callables.
    """
    programs, drawn = _programs(actual, expected, inputs, world)
    check_kind(at_least)
    proof = _identical_by_structure(programs, world)
    if proof is not None:
        return proof
    alike = _one_rank_for_all(programs, is_drawn=inputs is None)
    return prove_programs(programs, alike=alike, drawn=drawn, at_least=at_least)


def _identical_by_structure(programs: Sequence[Program], world: AnyWorld | None) -> Proof | None:
    """Return a proof of two large graphs of which only a part has to run; None if all has to."""
    graphs = []
    for program in programs:
        if not isinstance(program, GraphProgram) or isinstance(program, GraphOnRanks):
            return None
        graphs.append(program.gm)

    def prove_parts(parts: Sequence[fx.GraphModule]) -> Proof:
        own, drawn = _programs(parts[0], parts[1], None, world)
        alike = _one_rank_for_all(own, is_drawn=True)
        return prove_programs(own, alike=alike, drawn=drawn, at_least="identical")

    begun = time.perf_counter()
    proof = prove_by_structure(graphs, prove_parts)
    if proof is None:
        return None
    ranks = 1 if world is None else net_of_any(world).size
    results = len(graphs[1].graph.output_node().all_input_nodes)
    results += world is None  # their structure
    seconds = {"identical": time.perf_counter() - begun}
    assumes = _assumed_of_launches(programs) + proof.assumes
    return replace(proof, compared=ranks * results, seconds=seconds, assumes=assumes)


def prove_at_once(actual: Any, expected: Any, kind: str, *, world: AnyWorld | None = None) -> Proof:
    """Return whether two graphs are equal in this kind, without the time of stronger ones.

    The proof has this kind or "unknown"; arguments and errors are those of ``prove``.
    """
    programs, drawn = _programs(actual, expected, None, world)
    alike = _one_rank_for_all(programs, is_drawn=True)
    return prove_programs(programs, alike=alike, drawn=drawn, at_least=kind, at_once=True)


def prove_programs(
    programs: Sequence[Program],
    *,
    alike: Sequence[OneRankForAll] = (),
    drawn: str = "",
    at_least: str = "rounds elsewhere",
    at_once: bool = False,
) -> Proof:
    """Return which kind of equal two programs are.

    Args:
        alike: the same programs, of which one rank runs. If they differ, all ranks have to run.
        drawn: what was made up about their inputs, in words.
        at_least: as for ``prove``.
        at_once: look for this kind alone, not for stronger ones first.
    """
    check_kind(at_least)
    seconds: dict[str, float] = {}
    failed: tuple[str, Run, Run] | None = None
    kinds = KINDS[: KINDS.index(at_least) + 1]
    if at_once:
        kinds = kinds[-1:]
    if isinstance(programs[0], GraphOnRanks):
        kinds = tuple(kind for kind in kinds if kind not in _IN_ORDER)
        if not kinds:
            raise ValueError(
                f"at_least={at_least!r} on real ranks: nobody knows in which order they add. "
                'Take "reordered", or a simulated world'
            )

    with long_work("proof") as note:
        for kind in kinds:
            note(f"is it {kind}?")
            begun = time.perf_counter()
            attempt = _Attempt()
            if alike:
                attempt = _attempt(alike, kind)
            if not attempt.is_equal:
                attempt = _attempt(programs, kind)
            if attempt.is_equal:
                attempt = _held_to_numbers(attempt, programs, kind, is_one_for_all=bool(alike))
            seconds[kind] = time.perf_counter() - begun
            if attempt.reason:
                return Proof("unknown", reason=attempt.reason, seconds=seconds)
            if attempt.is_equal:
                return _equal(kind, programs, attempt, failed, seconds, drawn)
            failed = kind, attempt.runs[0], attempt.runs[1]

    assert failed is not None
    return _different(programs, *failed, seconds)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The result of looking for one kind of equal.

    Attributes:
        runs: of both programs, in the arithmetic that says most.
        reason: why nothing is known.
        unchecked: why no numbers could be compared.
    """

    runs: Sequence[Run] = ()
    is_equal: bool = False
    reason: str = ""
    unchecked: str = ""


def _attempt(programs: Sequence[Program], kind: str) -> _Attempt:
    """Run two programs in each arithmetic that may find a kind of equal, until one does."""
    first: Sequence[Run] = ()
    for arithmetic in _ARITHMETICS[kind]:
        if first and not _may_find_more(arithmetic(), first):
            continue
        try:
            *runs, differ = _run_both(programs, arithmetic)
        except NoMeaning as error:
            return _Attempt(reason=str(error))
        reason = _first_reason(programs, _says_nothing(*runs))
        if not differ and not reason:
            reason = _first_reason(programs, _apart_in_real_numbers(kind, *runs))
            if not reason:
                return _Attempt(runs, is_equal=True)
            if kind == "identical":
                reason = ""  # other bits are no reason to know nothing: another kind may hold
        if reason:
            return _Attempt(reason=reason)
        first = first or runs

    return _Attempt(first)


def _held_to_numbers(
    attempt: _Attempt, programs: Sequence[Program], kind: str, *, is_one_for_all: bool
) -> _Attempt:
    """Return an attempt, unless the numbers of both programs contradict it.

    If nothing is decided, then real numbers of the attempt itself have been compared. So bits need
    no other look, nor does one rank that stands for all: a run of all costs more than the proof.
    """
    decides = any(run.arithmetic.decisions for run in attempt.runs)
    if not any(programs[0].gathered(decides)) and (kind == "identical" or is_one_for_all):
        return attempt
    runs: list[Run] = []

    def compare(numbers: Numbers) -> Difference:
        return _compare_in_numbers(programs, numbers, runs)

    try:
        reads = any(programs[0].gathered(any(run.reads for run in attempt.runs)))
        reason = contradiction(kind, compare, reads=reads)
    except NoMeaning as error:
        return replace(attempt, unchecked=says_unchecked(error))
    if not reason:
        # Of the first draw, whose inputs are near those that are given.
        reason = _first_reason(programs, _apart_in_real_numbers(kind, *runs[:2]))
        if reason and kind == "identical":
            return replace(attempt, is_equal=False)  # other bits: another kind may hold
    return _Attempt(reason=reason) if reason else attempt


def _compare_in_numbers(
    programs: Sequence[Program], numbers: Numbers, made: list[Run]
) -> Difference:
    """Run both sides on numbers, and return their difference; of each with itself, if shaken.

    The runs are added to ``made``.
    """
    if not numbers.is_shaken:
        runs = [programs[0].run(copy.deepcopy(numbers)), programs[1].run(numbers)]
        made += runs
        numbers.has_digits = any(run.arithmetic.has_digits for run in runs)
        return _difference_in_numbers(programs, runs, numbers)
    found = []
    for program in programs:
        runs = [program.run(Numbers(numbers.seed)), program.run(copy.deepcopy(numbers))]
        found.append(_difference_in_numbers(programs, runs, runs[0].arithmetic))
    return largest(found)


def _difference_in_numbers(
    programs: Sequence[Program], runs: Sequence[Run], numbers: Any
) -> Difference:
    """Return the largest difference of two runs on any rank."""
    actual, expected = (run.results for run in runs)
    known = {
        key
        for key in actual.keys() & expected.keys()
        if actual[key].is_known and expected[key].is_known
    }
    sides = []
    for results in (actual, expected):
        side = {}
        for key, made in results.items():
            if key in known:
                side[key] = as_integers(made.elements)  # equal in their bits, or not at all
            else:
                side[key] = made.elements.double() if made.is_known else numbers_of(made.elements)
        sides.append(side)
    inputs = max(programs[0].gathered(numbers.largest))
    return largest(programs[0].gathered(difference(sides[0], sides[1], inputs)))


def _first_reason(programs: Sequence[Program], own: str) -> str:
    """Return what the first rank says that says anything."""
    return next((reason for reason in programs[0].gathered(own) if reason), "")


def check_kind(kind: str) -> None:
    """Raise a ValueError unless a kind of equal has this name."""
    if kind not in KINDS:
        raise ValueError(f"at_least={kind!r}: take one of {', '.join(map(repr, KINDS))}")


def _run_both(
    programs: Sequence[Program], arithmetic: Callable[[], Arithmetic]
) -> tuple[Run, Run, bool]:
    """Run two programs in an arithmetic, and return the runs, and whether they differ.

    If they decide something, or take few square roots, one run may be equal by chance. Then they
    run again: with abstract elements above and below all known numbers, and with other elements.
    """
    first, differ = _run_once(programs, arithmetic())
    if differ:
        return *first, True
    gathered = programs[0].gathered([Chances.of(run.arithmetic) for run in first])
    actual, expected = ([own[side] for own in gathered] for side in (0, 1))
    in_order = isinstance(first[0].arithmetic, Terms)
    # Kernels that compare other numbers are not the same on the same values.
    compares_others = bool(unlike_limits(actual, expected)) or _have_other_rivals(programs, first)
    if in_order and compares_others:
        return *first, True
    for aim in aims(actual, expected):
        again = arithmetic()
        aim.give_to(again)
        runs, differ = _run_once(programs, again)
        needs_rivals = not (differ or in_order or aim.is_for_limits)
        if needs_rivals and _have_other_rivals(programs, runs):
            again = arithmetic()
            aim.give_to(again)
            again.favoured = _other_rivals(runs)
            runs, differ = _run_once(programs, again)
        if differ:
            return *runs, True
        for run, later in zip(first, runs, strict=True):
            add_branches(run.arithmetic, later.arithmetic)

    return *first, False


def _other_rivals(runs: Sequence[Run]) -> Tensor:
    """Return the elements that one of two programs alone compares with others, or sorts."""
    actual, expected = (run.arithmetic.rivals for run in runs)
    return other_rivals(actual, expected)


def other_rivals(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the elements, but 0, that are in one of two sets, if these are complete."""
    if max(len(actual), len(expected)) >= MOST_RIVALS:
        return torch.empty(0, dtype=torch.int64)
    found, counts = torch.cat([actual, expected]).unique(return_counts=True)
    return found[(counts == 1) & (found != 0)]


def _have_other_rivals(programs: Sequence[Program], runs: Sequence[Run]) -> bool:
    return any(programs[0].gathered(bool(len(_other_rivals(runs)))))


def add_branches(arithmetic: Arithmetic, later: Arithmetic) -> None:
    """Add the branches that a program has taken in a later run."""
    for where, numbers in later.branches.items():
        arithmetic.branches.setdefault(where, set()).update(numbers)


def _run_once(programs: Sequence[Program], arithmetic: Arithmetic) -> tuple[tuple[Run, Run], bool]:
    runs = programs[0].run(copy.deepcopy(arithmetic)), programs[1].run(arithmetic)
    return runs, _first_difference(programs, *runs) is not None


def _first_difference(programs: Sequence[Program], actual: Run, expected: Run) -> Place | None:
    """Return the first result that differs, on the first rank where one does."""
    own = first_difference(actual.results, expected.results)
    return next((place for place in programs[0].gathered(own) if place is not None), None)


AGAIN = ((0, 1), (0, -1), *((seed, 0) for seed in range(1, 7)))
"""Seeds and biases of further runs: one element decides alike in all with a chance of 1 in 64."""

_AGAIN_FOR_FEW = tuple((seed, 0) for seed in range(7, 15))


@dataclass(frozen=True, slots=True)
class Chances:
    """What may have made results of a run equal by chance.

    Attributes:
        decides: elements were compared or sorted.
        decides_few: few elements were compared with each other, or sorted.
        roots: square roots were taken.
        fewest_roots: of how few different elements.
        limits: elements and keys of known numbers that elements were compared with.
    """

    decides: bool = False
    decides_few: bool = False
    roots: bool = False
    fewest_roots: int = FEW
    limits: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, *arithmetics: Arithmetic) -> "Chances":
        return cls(
            any(each.decisions for each in arithmetics),
            any(each.few for each in arithmetics),
            any(each.roots for each in arithmetics),
            min(each.fewest_roots for each in arithmetics),
            tuple(sorted(pair for each in arithmetics for pair in each.limits.items())),
        )


@dataclass(frozen=True, slots=True)
class Aim:
    """A further run, in which elements are in another order.

    Attributes:
        gaps: as of an ``Arithmetic``.
        sign: of all inputs, 1 or -1; 0 for inputs of either sign.
        is_for_limits: the run compares two limits that are not the same.
    """

    seed: int
    bias: int = 0
    gaps: tuple[tuple[int, int], ...] = ()
    is_for_limits: bool = False
    sign: int = 0

    def give_to(self, arithmetic: Arithmetic) -> None:
        arithmetic.set_seed(self.seed)
        arithmetic.bias, arithmetic.sign = self.bias, self.sign
        arithmetic.gaps = self.gaps


def aims(actual: Sequence[Chances], expected: Sequence[Chances]) -> list[Aim]:
    """Return the further runs of two sides, whose chances are given by rank.

    In runs with a seed elements lie between any two limits. Of limits that one side alone has, such
    as .5 and .51, further runs have all elements between the two.
    """
    keys: dict[int, int] = {}
    for each in (*actual, *expected):
        for element, key in each.limits:
            keys.setdefault(element, abs(key))
    unlike = {keys[element] for element in unlike_limits(actual, expected)}
    ends = [0, *sorted(set(keys.values())), _LARGEST_KEY]
    gaps, between_unlike, beside_unlike = [], [], []
    for low, high in itertools.pairwise(ends):
        gaps.append((low + 1, max(1, high - low - 1)))
        if not {low, high} & unlike or high == _LARGEST_KEY:
            continue
        beside_unlike.append(gaps[-1])
        if low > 0:
            between_unlike.append(gaps[-1])

    found = []
    for seed, bias in runs_again(*actual, *expected):
        found.append(Aim(seed, bias, tuple(gaps) if seed and len(gaps) > 2 else ()))
    seeds = [aim.seed for aim in found if aim.seed]
    for gap in between_unlike:
        found += [Aim(seed, gaps=(gap,), is_for_limits=True) for seed in seeds]
    # What asks for all elements of a tensor, as (x > .3).all(), is true of one sign alone.
    for gap, sign in itertools.product(beside_unlike, (1, -1)):
        found.append(Aim(1, gaps=(gap,), is_for_limits=True, sign=sign))
    return found


def unlike_limits(actual: Sequence[Chances], expected: Sequence[Chances]) -> set[int]:
    """Return the limits that one side alone compares elements with."""
    ours = {element for each in actual for element, _ in each.limits}
    theirs = {element for each in expected for element, _ in each.limits}
    return ours ^ theirs


def runs_again(*chances: Chances) -> tuple[tuple[int, int], ...]:
    """Return seeds and biases of further runs.

    Where few elements decide, all decide alike in these with a chance of 1 in 16,000. Where roots
    are taken, inputs are above 0 in one run and below in another. Signs of roots of independent
    elements agree by chance in 1 of 60,000, of one or two elements in 1 of 250.
    """
    if any(each.decides for each in chances):
        return AGAIN + (_AGAIN_FOR_FEW if any(each.decides_few for each in chances) else ())
    if not any(each.roots for each in chances):
        return ()
    # One number that is a factor of all gives all of them one sign, so inputs of either sign run.
    runs = math.ceil(FEW / min(each.fewest_roots for each in chances))
    return AGAIN[:2] + tuple((seed, 0) for seed in range(1, min(runs, _MOST_FOR_ROOTS)))


_MOST_FOR_ROOTS = 8
_MOST_LIMITS_OF_FEW = 8
_ANSWERS = {"True", "False"}
_LARGEST_KEY = (1 << 62) + (1 << 54)  # above what ``key_of_real`` gives for any number


def _programs(
    actual: Any, expected: Any, inputs: Any, world: AnyWorld | None
) -> tuple[tuple[Program, Program], str]:
    """Return both programs with their inputs, and what was drawn of these."""
    graphs = [_graph_of(actual), _graph_of(expected)]
    for given, gm in zip((actual, expected), graphs, strict=True):
        if gm is None and not callable(given):
            raise ValueError(f"{given!r} is no graph and cannot be called")
        if gm is not None and world is None:
            _refuse_collectives(gm)

    first = graphs[1] or graphs[0]
    drawn = ""
    if world is not None and (first is None or None in graphs):
        raise ValueError("in a world, both programs are graphs: trace the callable first")
    if isinstance(world, World) and world.kind == "ranks":
        given = _inputs_of_this_rank(first, inputs)
        if inputs is None:
            drawn = describe_integers(first, given)
        return (GraphOnRanks(graphs[0], given), GraphOnRanks(graphs[1], given)), drawn

    if world is not None:
        net = net_of_any(world)
        inputs, drawn = _inputs_of_ranks(first, inputs, net.size)
    elif inputs is None:
        if first is None:
            raise ValueError("two callables: give the inputs of one call, inputs=")
        inputs = draw_inputs(first, seed=0)
        drawn = describe_integers(first, inputs)
    else:
        _check_inputs(inputs)

    is_mixed = None in graphs  # outputs of a function have no names, only places
    made: list[Program] = []
    for given, gm in zip((actual, expected), graphs, strict=True):
        if gm is None:
            made.append(FunctionProgram(given, inputs))
        else:
            made.append(GraphProgram(gm, inputs, world, by_place=is_mixed))
    return (made[0], made[1]), drawn


def _refuse_collectives(gm: fx.GraphModule) -> None:
    for node in nodes_within(gm):
        if launches(node.target):
            raise ValueError(f"{node.name} communicates: give world=, a simulated world or net")


def _inputs_of_this_rank(gm: fx.GraphModule, inputs: Any) -> Sequence[Any]:
    rank = dist.get_rank()
    if inputs is None:
        return draw_inputs(gm, seed=rank)
    if callable(inputs):
        inputs = inputs(rank)
    _check_inputs(inputs)
    return inputs


def _check_inputs(inputs: Any) -> None:
    if not isinstance(inputs, list | tuple):
        raise ValueError(f"inputs= is a {type(inputs).__name__}: give a tuple, (x,) for one input")


def _one_rank_for_all(programs: Sequence[Program], *, is_drawn: bool) -> list[OneRankForAll]:
    """Return programs in which one rank stands for all; none if the ranks are not alike."""
    found = []
    for program in programs:
        if not isinstance(program, GraphProgram) or program.world is None:
            return []
        if not is_drawn and not differ_only_in_floats(program.inputs):
            return []
        found.append(OneRankForAll(program))
    return found


def _inputs_of_ranks(gm: fx.GraphModule, inputs: Any, size: int) -> tuple[list[Sequence[Any]], str]:
    if inputs is None:
        drawn = [draw_inputs(gm, seed=rank) for rank in range(size)]
        return [*drawn], describe_integers(gm, drawn[0])
    if callable(inputs):
        inputs = map(inputs, range(size))
    of_ranks = list(inputs)
    if len(of_ranks) != size:
        raise ValueError(f"inputs= has {len(of_ranks)} entries, the world has {size} ranks")
    return of_ranks, ""


def _graph_of(program: Any) -> fx.GraphModule | None:
    is_graph = isinstance(program, fx.GraphModule | fx.Graph | ExportedProgram)
    if is_graph or isinstance(getattr(program, "gm", None), fx.GraphModule):
        return adopt(program)
    return None


def _says_nothing(actual: Run, expected: Run) -> str:
    """Return why a comparison of two runs would prove nothing; "" if it would."""
    for run in (expected, actual):
        if not any(made.elements.numel() for made in run.results.values() if not made.is_known):
            if run.arithmetic.decisions:
                return (
                    "abstract inputs only decide which known numbers are returned, as argmax does: "
                    "return what is computed of them, too, such as x[x.argmax()]"
                )
            return (
                "no result depends on an abstract input, or all that do are empty: give inputs "
                "with floating-point tensors that have elements, or return what is computed of them"
            )
        for (name, rank), made in run.results.items():
            real = run.real.get((name, rank))
            if made.is_known or real is None or made.elements.shape != real.shape:
                continue
            # All NaN are equal, so these elements would be equal whatever they are made of.
            is_nan = run.arithmetic.not_finite(made.elements)[2]
            if bool((is_nan & ~real.isnan()).any()):
                return (
                    f"{name} is NaN in exact arithmetic alone: an infinity, as of a mask, is "
                    "multiplied by numbers that nobody knows"
                )
    return ""


KNOWN = "depends on no abstract input"


def first_difference(actual: Mapping[Key, Made], expected: Mapping[Key, Made]) -> Place | None:
    """Return the first result that differs, in the order of the expected ones."""
    for name, rank in expected:
        if (name, rank) not in actual:
            says = "is not written to" if name.endswith(AFTERWARDS) else "is missing"
            return Place(name, rank, says=says)
        place = _difference(name, rank, actual[name, rank], expected[name, rank])
        if place is not None:
            return place
    for name, rank in actual:
        if (name, rank) not in expected:
            says = "is written to" if name.endswith(AFTERWARDS) else "is not expected"
            return Place(name, rank, says=says)
    return None


def _difference(name: str, rank: int | None, actual: Made, expected: Made) -> Place | None:
    if actual.equals(expected):
        return None
    found, wanted = actual.elements, expected.elements
    if actual.dtype != expected.dtype:
        return Place(name, rank, says=f"{actual.dtype}, expected {expected.dtype}")
    if found.shape != wanted.shape:
        return Place(name, rank, says=f"shape {list(found.shape)}, expected {list(wanted.shape)}")
    if actual.is_known != expected.is_known:
        known = "actual" if actual.is_known else "expected"
        return Place(name, rank, says=f"the {known} one {KNOWN}")

    # As integers, since known numbers may be NaN or zeros of both signs.
    places = (as_integers(found) != as_integers(wanted)).nonzero()
    if not len(places):
        return None
    element = tuple(places[0].tolist())
    return Place(name, rank, element, len(places), found.numel())


def _apart_in_real_numbers(kind: str, actual: Run, expected: Run) -> str:
    """Return how the real numbers of two runs contradict a proof; "" if they do not.

    They would, if something computed where no dispatch mode sees it, such as NumPy. Where abstract
    elements were compared the real numbers followed these, and mean nothing.
    """
    if actual.arithmetic.decisions or expected.arithmetic.decisions:
        return ""
    floats: dict[Key, Tensor] = {}
    for key, real in expected.real.items():
        if real.is_floating_point() and real.numel():
            floats[key] = real.double()

    largest = max((_magnitude(real) for real in floats.values()), default=0.0)
    # Numbers of eight bits have one digit, and what is computed from several may have none.
    share = max(0.1, 8 * actual.arithmetic.coarsest, 8 * expected.arithmetic.coarsest)
    for (name, rank), wanted in floats.items():
        found = actual.real.get((name, rank))
        if found is None or found.shape != wanted.shape:
            continue
        if kind == "identical":
            real = expected.real[name, rank]
            if not Made(found, found.dtype, True).equals(Made(real, real.dtype, True)):
                return f"the bits of {name} differ"
            continue
        # A result near zero may be what large numbers leave, and then has their errors.
        allowed = share * _magnitude(wanted) + 1e-3 * largest
        error = _magnitude(found.double() - wanted)
        if error > allowed or not torch.equal(found.isnan(), wanted.isnan()):
            where = "" if rank is None else f" on rank {rank}"
            return (
                f"the real numbers of {name}{where} are apart, though the elements are equal: "
                "rounding leaves no digit, or something computes where no dispatch mode sees it"
            )

    return ""


def _magnitude(tensor: Tensor) -> float:
    return float(tensor.nan_to_num().abs().max())


def _assumptions(runs: Sequence[Run], drawn: str) -> tuple[str, ...]:
    found = [drawn] if drawn else []
    constant = []
    for (name, rank), made in runs[1].results.items():
        if made.is_known and made.dtype.is_floating_point and made.elements.numel():
            constant.append(name if rank is None else f"{name} of rank {rank}")

    if constant:
        found.append(f"{_shown(constant)} depend on no abstract input: their numbers are equal")

    reads = sum(sum(run.reads.values()) for run in runs)
    found += taken_on_trust([run.arithmetic for run in runs], reads)
    return tuple(found)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def says_known(names: Sequence[str]) -> tuple[str, ...]:
    """Say which tensors have known numbers in a proof."""
    return (f"the numbers of {_shown(names)} stay what they are",) if names else ()


_TAKEN_ON_TRUST = {
    "masks": "exp is 0 where a mask of -1e4 or less is filled in, or added",
    "lowest": "what a mask of -1e4 or less was added to is below all that has no mask",
    "has_many_limits": "limits that only decide, as .5 in where(x > .5, a, b), have the same "
    "values: there are more than are compared",
}


def taken_on_trust(arithmetics: Sequence[Arithmetic], reads: int) -> list[str]:
    """Say what equal results of these arithmetics take for granted.

    Args:
        reads: how many real numbers the programs have asked for.
    """
    found = []
    opaque: set[str] = set()
    meant: set[str] = set()
    chosen: set[str] = set()
    compared: set[str] = set()
    finite: set[str] = set()
    for arithmetic in arithmetics:
        opaque.update(arithmetic.opaque)
        meant.update(arithmetic.meanings)
        chosen.update(arithmetic.chosen)
        compared.update(arithmetic.never_equal)
        finite.update(arithmetic.finite)

    for noted, says in _TAKEN_ON_TRUST.items():
        if any(getattr(arithmetic, noted) for arithmetic in arithmetics):
            found.append(says)
    if opaque:
        found.append(f"{', '.join(sorted(opaque))} depend on nothing but their arguments")
    if meant:
        found.append(f"{', '.join(sorted(meant))} compute what their meaning(...) says")
    if reads:
        found.append(f"numbers that the program reads stay what they are ({reads} are read)")
    if chosen:
        found.append(
            f"what {', '.join(sorted(chosen))} chose in {len(AGAIN) + 1} orders shows every choice"
        )
    if compared:
        found.append(f"no two compared numbers are equal ({', '.join(sorted(compared))})")
    if finite:
        found.append(f"abstract numbers are finite ({', '.join(sorted(finite))})")
    most = max((len(arithmetic.limits) for arithmetic in arithmetics), default=0)
    if most > _MOST_LIMITS_OF_FEW and any(arithmetic.few for arithmetic in arithmetics):
        found.append(f"few numbers are compared with {most} limits, and seldom lie between two")
    return found + _says_branches(arithmetics)


def _says_branches(arithmetics: Sequence[Arithmetic]) -> list[str]:
    """Say where programs have gone on by comparisons, of which not all answers have shown."""
    found = []
    branches: dict[str, set[str]] = {}
    for arithmetic in arithmetics:
        for where, numbers in arithmetic.branches.items():
            branches.setdefault(where, set()).update(numbers)
    alike = {where for where, numbers in branches.items() if len(numbers) == 1}
    shown = sorted(where for where in alike if where.partition(" (")[0] not in alike - {where})
    if shown:
        found.append(
            f"all {len(AGAIN) + 1} orders take the same branch at {', '.join(shown)}: of the "
            "other one nothing is known"
        )
    read = {where for where in branches.keys() - alike if " (" not in where}
    counts = sorted(where for where in read if not branches[where] <= _ANSWERS)
    if counts:
        found.append(
            f"numbers that are read of comparisons at {', '.join(counts)} are those of "
            f"{len(AGAIN) + 1} orders: of others nothing is known"
        )
    return found


def unlike_operators(actual: Sequence[Arithmetic], expected: Sequence[Arithmetic]) -> list[str]:
    """Return the operators of unknown meaning that two sides call with other arguments."""
    sides: list[dict[str, set[int]]] = []
    for arithmetics in (actual, expected):
        calls: dict[str, set[int]] = {}
        for arithmetic in arithmetics:
            for name, hashes in arithmetic.opaque.items():
                calls[name] = calls.get(name, set()) | hashes
        sides.append(calls)
    ours, theirs = sides
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def says_unlike(operators: Sequence[str]) -> str:
    """Say that a difference may come from operators of unknown meaning."""
    return (
        f"the results differ, and nobody knows what {', '.join(operators)} compute: "
        "say it with meaning(operator, reference)"
    )


def _equal(
    kind: Any,
    programs: Sequence[Program],
    attempt: _Attempt,
    failed: tuple[str, Run, Run] | None,
    seconds: dict[str, float],
    drawn: str,
) -> Proof:
    first, origin = None, ""
    if failed is not None:
        first = _first_difference(programs, failed[1], failed[2])
        origin = find_origin(programs, failed[0], first, failed[1].arithmetic)
    assumes = _assumptions(attempt.runs, drawn)
    assumes += says_known(sorted({*programs[0].known(), *programs[1].known()}))
    if attempt.unchecked:
        assumes += (attempt.unchecked,)
    assumes += _assumed_of_launches(programs)
    return Proof(
        kind,
        compared=_count_results(programs[1], attempt.runs[1]),
        first=first,
        origin=origin,
        assumes=assumes,
        seconds=seconds,
    )


def _assumed_of_launches(programs: Sequence[Program]) -> tuple[str, ...]:
    """Name collectives of which one program alone reads no result."""
    unread = []
    for program in programs:
        gm = program.gm if isinstance(program, GraphProgram) else None
        unread.append(len(unread_launches(gm)) if gm is not None else 0)
    if unread[0] == unread[1]:
        return ()
    many = f"{unread[0]} and {unread[1]} collectives"
    return (f"nobody reads the results of {many}, and what they cost is not compared",)


def _count_results(program: Program, run: Run) -> int:
    """Count the results of all ranks; of a run on one rank too."""
    ranks = {rank for _, rank in run.results} - {None}
    count = len(run.results)
    if len(ranks) == 1 and isinstance(program, GraphProgram) and program.world is not None:
        # One rank has run for all. Its results count once for each of the others, too.
        others = net_of_any(program.world).size - 1
        count += others * sum(rank is not None for _, rank in run.results)
    return count


def _different(
    programs: Sequence[Program], kind: str, actual: Run, expected: Run, seconds: dict[str, float]
) -> Proof:
    first = _first_difference(programs, actual, expected)
    if first is None:
        reason = f"not {kind}: {_apart_in_real_numbers(kind, actual, expected)}"
        return Proof("unknown", len(expected.results), reason=reason, seconds=seconds)

    unlike = unlike_operators([actual.arithmetic], [expected.arithmetic])
    origin = find_origin(programs, kind, first, actual.arithmetic)
    factor = None
    if first.element is not None and kind in ("reordered", "rounds elsewhere"):
        key = first.result, first.rank
        own = None
        if key in actual.results:  # of other real ranks there is nothing here
            found, wanted = actual.results[key], expected.results[key]
            if not found.is_known and not wanted.is_known:
                own = common_factor(found.elements, wanted.elements)
        factors = programs[0].gathered(own)
        factor = next((each for each in factors if each is not None), None)

    if unlike and factor is None and first.element is not None:
        reason = says_unlike(unlike)
        return Proof(
            "unknown", len(expected.results), first, origin, reason=reason, seconds=seconds
        )

    weakest = kind == "rounds elsewhere"
    if weakest and (first.element is not None or first.says.endswith(KNOWN)):

        def compare(numbers: Numbers) -> Difference:
            return _compare_in_numbers(programs, numbers, [])

        decides = actual.arithmetic.decisions + expected.arithmetic.decisions
        reason = agreement(compare, decides=any(programs[0].gathered(decides)))
        if reason:
            return Proof(
                "unknown", len(expected.results), first, origin, reason=reason, seconds=seconds
            )
    return Proof(
        "another function" if weakest else "unknown",
        compared=len(expected.results),
        first=first,
        origin=origin,
        factor=factor,
        reason="" if weakest else f"not {kind}; weaker kinds were not looked for",
        seconds=seconds,
    )


def common_factor(found: Tensor, wanted: Tensor) -> Fraction | None:
    """Return the small fraction that all elements are multiplied by; None if there is none."""
    field = Prime(P)
    is_number = (wanted > 0) & (wanted < P) & (found < P)
    if not bool(is_number.any()) or bool(((found != wanted) & ~is_number).any()):
        return None
    factors = field.divide(found[is_number], wanted[is_number]).unique()
    if len(factors) > 1:
        return None
    return field.small_fraction(int(factors[0]))


def find_origin(
    programs: Sequence[Program], kind: str, first: Place | None, like: Arithmetic
) -> str:
    """Run both programs again, and return where their difference begins."""
    if first is None or first.element is None:
        return ""
    arithmetics = [_ARITHMETICS[kind][0]() for _ in programs]
    for arithmetic in arithmetics:
        arithmetic.order_as(like)

    made = AllElements()
    trail = Trail(made)
    try:
        programs[1].run(arithmetics[1], made)
        with facts.watching({"node": trail.come_to}):
            programs[0].run(arithmetics[0], trail)
    except NoMeaning:
        return ""  # who looks reads more tensors than the programs do

    tensor = programs[0].last.get((first.result, first.rank))
    return _first_reason(programs, "" if tensor is None else trail.origin_of(tensor))


@facts.check
def assert_same_function(
    actual: Any,
    expected: Any,
    *,
    at_least: str = "reordered",
    inputs: Any = None,
    world: AnyWorld | None = None,
) -> Proof:
    """Fail unless two programs are equal in a kind, or in a stronger one.

    Args:
        at_least: "identical" (the same bits for any numbers), "other kernels", "reordered" (the
            same function, additions in another order), or "rounds elsewhere".
        actual, expected, inputs, world: as for ``prove``.

    Raises:
        AnotherFunction: they are not, or nobody knows; the message says which kind, and where it
            begins.
        ValueError: as ``prove``.
    """
    __tracebackhide__ = True
    check_kind(at_least)
    proof = prove(actual, expected, inputs=inputs, world=world)
    facts.emit("verdict", outcome=proof.kind, tensors=proof.compared, what="proof")
    if not proof.is_at_least(at_least):
        raise AnotherFunction(f"expected at least {at_least!r}\n{proof}", proof)
    return proof
