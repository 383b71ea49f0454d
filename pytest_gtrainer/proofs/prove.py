"""Prove which kind of equal two programs are.

``prove_programs`` looks for the kinds one after the other, the strongest first:

1. *Attempts.* Both programs run in each arithmetic that may find this kind (``_ATTEMPTS``), until
   they are equal in one: in a first run, and in further runs if that could be chance. If all ranks
   are alike, one runs for all; if the programs differ on it, all ranks run.
2. *Numbers.* Equal programs run in float64, too. If these results are far apart, the proof is
   "unknown".
3. *The answer.* If they are equal, this is the kind. If they differ, the next kind is looked for.
   If they differ in the weakest one, they are another function.

On real ranks each function below that takes ``programs`` is a collective: every rank has to call
it. All ranks take the same way, because they decide by what ``gather_from_all_ranks`` returns.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.foreign_graphs import ExportedProgram
from pytest_gtrainer._torch.values import OpOverload, pytree
from pytest_gtrainer.arithmetic.base import Arithmetic
from pytest_gtrainer.arithmetic.field import Field, FieldWithExponents
from pytest_gtrainer.arithmetic.numbers import Numbers, numbers_of
from pytest_gtrainer.arithmetic.prime import P, Prime
from pytest_gtrainer.arithmetic.terms import Terms
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.environment import collector_off
from pytest_gtrainer.facts import long_work, spell_some
from pytest_gtrainer.graph.collectives import launches, unread_launches
from pytest_gtrainer.graph.foreign import adopt, holds_state
from pytest_gtrainer.graph.nodes import AFTERWARDS, input_fqn
from pytest_gtrainer.graph.same_on_ranks import nodes_within
from pytest_gtrainer.numerics.bits import as_integers
from pytest_gtrainer.proofs.alike import OneRankForAll, differ_only_in_floats
from pytest_gtrainer.proofs.assumptions import (
    describe_empty,
    describe_known,
    describe_opaque,
    describe_unlike,
    taken_on_trust,
    unlike_operators,
)
from pytest_gtrainer.proofs.filled import FilledGraph, TensorsOfFunction, takes_state
from pytest_gtrainer.proofs.further_runs import (
    Chances,
    add_branches,
    further_runs,
    unlike_limits,
    unlike_rivals,
)
from pytest_gtrainer.proofs.in_numbers import (
    Difference,
    agreement,
    contradiction,
    describe_unchecked,
    difference,
    largest,
    lost_digits,
)
from pytest_gtrainer.proofs.inputs import (
    DrawnInputs,
    describe_integers,
    draw_inputs,
    refuse_no_numbers,
)
from pytest_gtrainer.proofs.on_ranks import GraphOnRanks
from pytest_gtrainer.proofs.origin import AllElements, Trail
from pytest_gtrainer.proofs.programs import (
    FunctionProgram,
    GraphProgram,
    Key,
    Program,
    ProgramRun,
    Result,
    are_apart,
    magnitude,
)
from pytest_gtrainer.proofs.proof import (
    KINDS,
    AnotherFunction,
    FirstDifference,
    Proof,
    Unchecked,
)
from pytest_gtrainer.proofs.structure import prove_by_structure
from pytest_gtrainer.worlds.simulate import AnyWorld, net_of_any
from pytest_gtrainer.worlds.spec import World

__tracebackhide__ = facts.hides_frames


def _have_functions(first: Sequence[Arithmetic]) -> bool:
    """Return whether exp, log or roots were computed.

    Without them a ``FieldWithExponents`` computes what a ``Field`` does.
    """
    return any(each.exponentials or each.roots for each in first)


def _have_softmax(first: Sequence[Arithmetic]) -> bool:
    """Return whether there is a softmax, whose results a field sorts as its operand.

    A softmax that is written by hand equals torch's only if this order is left out. Any order of
    the elements is possible, so programs that are equal without it are equal.
    """
    return any(isinstance(each, Field) and each.has_softmax for each in first)


def _have_digits(first: Sequence[Arithmetic]) -> bool:
    """Return whether known numbers are computed in float32, such as 1 - 0.9**step."""
    return any(each.has_digits for each in first)


def _always(first: Sequence[Arithmetic]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An arithmetic that may find two programs equal in a kind.

    Attributes:
        may_succeed: whether a run is worth its time. It is given the arithmetics of the first
            attempt of this kind, in which the programs differ.
        arithmetic: makes an arithmetic in which nothing has run.
    """

    may_succeed: Callable[[Sequence[Arithmetic]], bool]
    arithmetic: Callable[[], Arithmetic]


def _attempts_of_field(**options: Any) -> list[_Attempt]:
    return [
        _Attempt(_always, lambda: Field(**options)),
        _Attempt(_have_functions, lambda: FieldWithExponents(**options)),
        _Attempt(_have_softmax, lambda: FieldWithExponents(**options, orders_softmax=False)),
    ]


_ATTEMPTS: Mapping[str, Sequence[_Attempt]] = {
    "identical": [_Attempt(_always, lambda: Terms(strict=True))],
    "other kernels": [_Attempt(_always, lambda: Terms(strict=False))],
    "reordered": _attempts_of_field(casts="opaque"),
    "rounds elsewhere": [
        *_attempts_of_field(casts="identity"),
        _Attempt(_have_digits, lambda: FieldWithExponents(casts="identity", keeps_digits=True)),
    ],
}
"""By kind of equal, the attempts to find it: one of them has to succeed.

If none does, the runs of the first one say where the programs differ.
"""

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
            integers and bools stay what they are. Of Dynamo's graph against its model, those of the
            model: state that the graph takes is looked up by its FQN, and results are compared in
            order, without their structure. In a world a function of the rank, or one entry a rank.
            By default drawn for a graph: integers below the extents that they index.
        world: a simulated ``World``, a ``Net``, or a number of ranks, for graphs with collectives.
            They add in its order. In a ranks ``World`` every rank calls this, with its own inputs;
            only "reordered" and weaker kinds can be found.
        at_least: do not look for weaker kinds of equal than this one.

    Raises:
        ValueError: no inputs for callables, an input that nobody can make up or of another size or
            dtype than a graph was traced for, collectives without a world, or a world for
            callables; new tensors that are fake, or on the meta device.
    """
    refuse_no_numbers()
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
    with collector_off():  # what is noted of each node is gone before the next collection
        proof = prove_by_structure(graphs, prove_parts)
    if proof is None:
        return None
    ranks = 1 if world is None else net_of_any(world).size
    results = len(graphs[1].graph.output_node().all_input_nodes)
    if world is None:
        results += 1  # their structure
    seconds = {"identical": time.perf_counter() - begun}
    assumes = _assumed_of_launches(programs) + _assumed_of_state(programs) + proof.assumes
    assumes += _assumed_of_foreign_operators(graphs, proof.assumes)
    return replace(proof, compared=ranks * results, seconds=seconds, assumes=assumes)


def prove_at_once(
    actual: Any,
    expected: Any,
    kind: str,
    *,
    world: AnyWorld | None = None,
    explains: bool = True,
) -> Proof:
    """Return whether two graphs are equal in this kind, without the time of stronger ones.

    The proof has this kind or "unknown"; if two graphs differ in the weakest kind, it is "another
    function". Arguments and errors are those of ``prove``.

    Args:
        explains: if they differ, look for where that begins, in further runs; if they are equal,
            check that in float64 with inputs of several sizes. Else the proof of two that differ is
            "unknown", and says no more, and inputs of one size are enough.
    """
    programs, drawn = _programs(actual, expected, None, world)
    alike = _one_rank_for_all(programs, is_drawn=True)
    return prove_programs(
        programs, alike=alike, drawn=drawn, at_least=kind, at_once=True, explains=explains
    )


def prove_programs(
    programs: Sequence[Program],
    *,
    alike: Sequence[OneRankForAll] = (),
    drawn: str = "",
    at_least: str = "rounds elsewhere",
    at_once: bool = False,
    explains: bool = True,
) -> Proof:
    """Return which kind of equal two programs are.

    Args:
        alike: the same programs, of which one rank runs. If they differ, all ranks have to run.
        drawn: what was made up about their inputs, in words.
        at_least: as for ``prove``.
        at_once: look only for this kind, not for stronger ones first.
        explains: as for ``prove_at_once``.
    """
    check_kind(at_least)
    seconds: dict[str, float] = {}
    failed: tuple[str, ProgramRun, ProgramRun] | None = None
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
            have_run = alike or programs
            answer = _look_for(kind, have_run)
            if alike and not answer.is_equal:
                have_run = programs  # expressions that differ may be equal on each rank
                answer = _look_for(kind, have_run)
            if answer.is_equal:
                answer = _check_in_float64(answer, have_run, kind, draws_once=not explains)
            seconds[kind] = time.perf_counter() - begun
            if answer.reason:
                return Proof("unknown", reason=answer.reason, seconds=seconds)
            if answer.is_equal:
                return _equal(kind, programs, answer, failed, seconds, drawn)
            failed = kind, answer.runs[0], answer.runs[1]

    assert failed is not None
    if not explains:
        return Proof("unknown", reason=f"not {failed[0]}", seconds=seconds)
    return _different(programs, *failed, seconds)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer whether two programs are equal in one kind.

    Attributes:
        runs: of both programs; if they differ, those of the first attempt.
        reason: why nobody knows, which ends the search for weaker kinds, too; "" if it is known.
        unchecked: why no numbers could be compared.
    """

    runs: Sequence[ProgramRun] = ()
    is_equal: bool = False
    reason: str = ""
    unchecked: str = ""


def _look_for(kind: str, programs: Sequence[Program]) -> _Answer:
    """Make the attempts of a kind, until both programs are equal in one.

    The answer has a reason if an operator has no meaning, if nothing abstract is compared, or if
    real numbers contradict equal elements.
    """
    first: Sequence[ProgramRun] = ()
    for attempt in _ATTEMPTS[kind]:
        if not _on_any_rank(programs, attempt.may_succeed([run.arithmetic for run in first])):
            continue
        try:
            *runs, differ = _run_both(programs, attempt.arithmetic)
        except NoMeaning as error:
            return _Answer(reason=str(error))
        reason = _first_reason_of_all_ranks(programs, _why_nothing_is_compared(*runs))
        if reason:
            return _Answer(reason=reason)
        if not differ:
            reason = _first_reason_of_all_ranks(programs, _apart_in_real_numbers(kind, *runs))
            if not reason:
                reason = _describe_cut(*runs) or _why_no_element_decides(
                    programs, runs, attempt.arithmetic()
                )
                return _Answer(reason=reason) if reason else _Answer(runs, is_equal=True)
            # Bits that differ exclude "identical" only: a weaker kind may hold.
            if kind != "identical":
                return _Answer(reason=reason)
        first = first or runs

    return _Answer(first)


def _check_in_float64(
    answer: _Answer, programs: Sequence[Program], kind: str, draws_once: bool
) -> _Answer:
    """Return the answer "equal", unless float64 numbers of both programs contradict it.

    If no elements were compared or sorted, the bits of the real numbers have been compared in the
    runs themselves, so "identical" needs no second check. Where one rank has run for all, it is
    the one that is checked: the others have its numbers.
    """
    decides = _on_any_rank(programs, any(run.arithmetic.decisions for run in answer.runs))
    if not decides and kind == "identical":
        return answer
    runs: list[ProgramRun] = []

    def compare(numbers: Numbers) -> Difference:
        return _compare_in_numbers(programs, numbers, runs)

    try:
        reads = _on_any_rank(programs, any(run.reads for run in answer.runs))
        reason = contradiction(kind, compare, reads=reads, draws_once=draws_once)
    except NoMeaning as error:
        return replace(answer, unchecked=describe_unchecked(error))
    if not reason:
        # The first two runs are those of the first draw, whose inputs are near the given ones.
        reason = _first_reason_of_all_ranks(programs, _apart_in_real_numbers(kind, *runs[:2]))
        if reason and kind == "identical":
            return replace(answer, is_equal=False)  # other bits: a weaker kind may hold
        if not reason and kind in ("other kernels", "reordered"):
            reason = _first_reason_of_all_ranks(programs, _lost_digits(runs[:2]))
    return _Answer(reason=reason) if reason else answer


def _compare_in_numbers(
    programs: Sequence[Program], numbers: Numbers, all_runs: list[ProgramRun]
) -> Difference:
    """Run both sides on the numbers of a draw, and return their difference.

    If the numbers are ``shaken``, return by how much other roundings move a side: it is compared
    with itself.

    Args:
        all_runs: gets the runs of both sides, unless the numbers are shaken.
    """
    if not numbers.shaken:
        runs = [programs[0].run(copy.deepcopy(numbers)), programs[1].run(numbers)]
        all_runs += runs
        numbers.has_digits = any(run.arithmetic.has_digits for run in runs)
        _agree_on_draws(programs, numbers)
        return _difference_in_numbers(programs, runs, numbers)
    found = []
    for program in programs:
        runs = [program.run(Numbers(numbers.seed)), program.run(copy.deepcopy(numbers))]
        found.append(_difference_in_numbers(programs, runs, runs[0].arithmetic))
    return largest(found)


def _agree_on_draws(programs: Sequence[Program], numbers: Numbers) -> None:
    """Give all ranks the same notes, since these decide on more draws and on tolerances."""
    own = numbers.calls, numbers.coarsest, numbers.has_digits
    of_ranks = programs[0].gather_from_all_ranks(own)
    calls, coarsest, has_digits = zip(*of_ranks, strict=True)
    numbers.calls, numbers.coarsest = max(calls), max(coarsest)
    numbers.has_digits = any(has_digits)


def _difference_in_numbers(
    programs: Sequence[Program], runs: Sequence[ProgramRun], numbers: Any
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
        for key, result in results.items():
            if key in known:
                side[key] = as_integers(result.elements)  # equal in their bits, or not at all
            elif result.is_known:
                side[key] = result.elements.double()
            else:
                side[key] = numbers_of(result.elements)
        sides.append(side)
    inputs = max(programs[0].gather_from_all_ranks(numbers.largest))
    own = difference(sides[0], sides[1], inputs)
    return largest(programs[0].gather_from_all_ranks(own))


def _first_reason_of_all_ranks(programs: Sequence[Program], own: str) -> str:
    """Return the reason of the first rank that has one."""
    return next((reason for reason in programs[0].gather_from_all_ranks(own) if reason), "")


def _on_any_rank(programs: Sequence[Program], own: bool) -> bool:
    """Return whether something is so on any rank."""
    return any(programs[0].gather_from_all_ranks(own))


def check_kind(kind: str) -> None:
    """Raise a ValueError unless a kind of equal has this name."""
    if kind not in KINDS:
        raise ValueError(f"at_least={kind!r}: take one of {', '.join(map(repr, KINDS))}")


def _run_both(
    programs: Sequence[Program], make_arithmetic: Callable[[], Arithmetic]
) -> tuple[ProgramRun, ProgramRun, bool]:
    """Run two programs in an arithmetic, and return the runs, and whether they differ.

    They are equal if they are in a first run, and in all ``further_runs`` that it asks for. If they
    differ, the runs are those that do, otherwise the first ones.
    """
    first, differ = _run_once(programs, make_arithmetic())
    if differ:
        return *first, True
    of_ranks = programs[0].gather_from_all_ranks([Chances.of(run.arithmetic) for run in first])
    actual = [of_rank[0] for of_rank in of_ranks]
    expected = [of_rank[1] for of_rank in of_ranks]
    is_in_order = isinstance(first[0].arithmetic, Terms)
    if is_in_order:
        # Kernels that compare other numbers are not the same on the same values.
        compare_others = bool(unlike_limits(actual, expected))
        if compare_others or _have_unlike_rivals_on_any_rank(programs, first):
            return *first, True

    for further in further_runs(actual, expected):
        runs, differ = _run_once(programs, further.set_up(make_arithmetic()))
        may_have_rivals = not (differ or is_in_order or further.is_for_limits)
        if may_have_rivals and _have_unlike_rivals_on_any_rank(programs, runs):
            # The same run, in which these elements are larger or smaller than all others.
            favoured = _unlike_rivals(runs)
            runs, differ = _run_once(programs, further.set_up(make_arithmetic(), favoured))
        if differ:
            return *runs, True
        for run, later in zip(first, runs, strict=True):
            add_branches(run.arithmetic, later.arithmetic)

    return *first, False


def _run_once(
    programs: Sequence[Program], arithmetic: Arithmetic
) -> tuple[tuple[ProgramRun, ProgramRun], bool]:
    """Run both programs, and return whether they differ on any rank."""
    runs = programs[0].run(copy.deepcopy(arithmetic)), programs[1].run(arithmetic)
    return runs, _first_difference_on_all_ranks(programs, *runs) is not None


def _unlike_rivals(runs: Sequence[ProgramRun]) -> Tensor:
    """Return the elements that only one of two programs compares with others, or sorts."""
    return unlike_rivals(runs[0].arithmetic.rivals, runs[1].arithmetic.rivals)


def _have_unlike_rivals_on_any_rank(
    programs: Sequence[Program], runs: Sequence[ProgramRun]
) -> bool:
    """Return whether ``_unlike_rivals`` are there on any rank."""
    return _on_any_rank(programs, len(_unlike_rivals(runs)) > 0)


def _first_difference_on_all_ranks(
    programs: Sequence[Program], actual: ProgramRun, expected: ProgramRun
) -> FirstDifference | None:
    """Return the first result that differs, on the first rank where one does."""
    own = first_difference(actual.results, expected.results)
    of_ranks = programs[0].gather_from_all_ranks(own)
    return next((each for each in of_ranks if each is not None), None)


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

    return _programs_with(graphs, (actual, expected), inputs, world), drawn


def _programs_with(
    graphs: Sequence[fx.GraphModule | None], given: Sequence[Any], inputs: Any, world: Any
) -> tuple[Program, Program]:
    filled = _filled_graph(graphs, given, inputs)
    if filled is not None:
        return filled
    is_mixed = None in graphs  # outputs of a function have no names, only places
    programs: list[Program] = []
    for side, gm in zip(given, graphs, strict=True):
        if gm is None:
            programs.append(FunctionProgram(side, inputs))
        else:
            programs.append(GraphProgram(gm, inputs, world, by_place=is_mixed))
    return programs[0], programs[1]


def _filled_graph(
    graphs: Sequence[fx.GraphModule | None], given: Sequence[Any], inputs: Any
) -> tuple[Program, Program] | None:
    """Return programs of Dynamo's graph and of the model that it is of; None for other two.

    ``inputs`` are those of the model: what the graph takes besides is looked up in it.
    """
    programs: list[Program] = []
    for gm, function in (graphs[0], given[1]), (graphs[1], given[0]):
        others = [each for each in graphs if each is not gm]
        if gm is None or others != [None] or not takes_state(gm, function, inputs):
            continue
        programs = [FilledGraph(gm, function, inputs), TensorsOfFunction(function, inputs)]
        if gm is graphs[1]:
            programs.reverse()
    return (programs[0], programs[1]) if programs else None


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
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise ValueError(
                "inputs= has a nested tensor, whose elements nobody follows: give its values(), "
                "and build it in the function"
            )


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


def _inputs_of_ranks(
    gm: fx.GraphModule, inputs: Any, size: int
) -> tuple[Sequence[Sequence[Any]], str]:
    if inputs is None:
        drawn = DrawnInputs(gm, size)
        return drawn, describe_integers(gm, drawn[0])
    if callable(inputs):
        inputs = map(inputs, range(size))
    of_ranks = list(inputs)
    if len(of_ranks) != size:
        raise ValueError(f"inputs= has {len(of_ranks)} entries, the world has {size} ranks")
    return of_ranks, ""


def _graph_of(program: Any) -> fx.GraphModule | None:
    # As inputs, what an exported program holds would stand for any numbers, and programs that hold
    # other buffers would be equal. Torch cannot call a program with its gradients.
    if isinstance(program, ExportedProgram) and not program.graph_signature.backward_signature:
        program = program.module()
    is_graph = isinstance(program, fx.GraphModule | fx.Graph | ExportedProgram)
    if is_graph or isinstance(getattr(program, "gm", None), fx.GraphModule):
        return adopt(program)
    return None


def _why_nothing_is_compared(actual: ProgramRun, expected: ProgramRun) -> str:
    """Return why a comparison of two runs would prove nothing; "" if it proves something."""
    for run in (expected, actual):
        if not any(
            result.elements.numel() for result in run.results.values() if not result.is_known
        ):
            if run.arithmetic.decisions:
                return (
                    "abstract inputs only decide which known numbers are returned, as argmax does: "
                    "return what is computed of them, too, such as x[x.argmax()]"
                )
            return (
                "no result depends on an abstract input, or all that do are empty: give inputs "
                "with floating-point tensors that have elements, or return what is computed of them"
            )
        has_number = False
        for (name, rank), result in run.results.items():
            if result.is_known or not result.elements.numel():
                continue
            # All NaN are equal, so these elements would be equal whatever they are made of.
            is_nan = _are_nan(run, (name, rank))
            has_number = has_number or not bool(is_nan.all())
            real = run.real.get((name, rank))
            if real is None or result.elements.shape != real.shape:
                continue
            if bool((is_nan & ~real.isnan()).any()):
                return (
                    f"{name} is NaN in exact arithmetic alone: an infinity, as of a mask, is "
                    "multiplied by numbers that nobody knows"
                )
        # A mean of no elements is NaN, too: of these ``_why_no_element_decides`` speaks.
        if not (has_number or run.arithmetic.empty or run.arithmetic.empty_inputs):
            return (
                "every result is NaN, and all NaN are equal, whatever computes them: give inputs "
                "of which results are numbers, such as labels that are not all ignored"
            )
    return ""


def _are_nan(run: ProgramRun, key: Key) -> Tensor:
    """Return which elements of an abstract result are NaN, for any numbers of the inputs."""
    return run.arithmetic.not_finite(run.results[key].elements)[2]


def _nan_for_any_numbers(programs: Sequence[Program], run: ProgramRun) -> dict[Key, Tensor]:
    """Return by result of the second program which elements are NaN, whatever the inputs are.

    An element does not always show it: that of a mean over ignored labels is an unknown function.
    There a real result is NaN, and with other numbers it is, too.
    """
    found: dict[Key, Tensor] = {}
    is_open = False
    for key, result in run.results.items():
        if result.is_known or not result.elements.numel():
            continue
        found[key] = _are_nan(run, key)
        real = run.real.get(key)
        # Where elements were compared the real numbers followed these, and mean nothing.
        if real is not None and real.shape == found[key].shape and not run.arithmetic.decisions:
            is_open = is_open or bool((real.isnan() & ~found[key]).any())
    if not _on_any_rank(programs, is_open):
        return found
    try:
        others = programs[1].run(Numbers(2)).results
    except NoMeaning:
        return found
    for key, is_nan in found.items():
        other = others.get(key)
        if other is not None and not other.is_known and other.elements.shape == is_nan.shape:
            found[key] = is_nan | numbers_of(other.elements).isnan()
    return found


def _why_no_element_decides(
    programs: Sequence[Program], runs: Sequence[ProgramRun], arithmetic: Arithmetic
) -> str:
    """Return why equal results prove nothing if they are sums of no elements; "" if they do.

    Such results are the same for any inputs, as are NaN. So are those of ``x - x``, which is proven
    all the same: only programs with tensors without elements, or with NaN, are looked at.

    Args:
        arithmetic: an arithmetic of the kind of the runs, in which nothing has run.
    """
    has_empty = any(run.arithmetic.empty or run.arithmetic.empty_inputs for run in runs)
    nan = _nan_for_any_numbers(programs, runs[1])
    has_nan = any(bool(each.any()) for each in nan.values())
    if not _on_any_rank(programs, has_empty or has_nan):
        return ""
    decides = False
    arithmetic.set_seed(runs[1].arithmetic.seed + 1)
    try:
        other = programs[1].run(arithmetic)
    except NoMeaning:
        decides = True  # by other numbers it takes another way
    else:
        for key, is_nan in nan.items():
            is_other = key not in other.results or not runs[1].results[key].equals(
                other.results[key]
            )
            decides = decides or (is_other and not bool(is_nan.all()))
    if _on_any_rank(programs, decides):
        return ""
    if has_nan and not has_empty:
        return (
            "no element of an input decides a result: all that is computed is NaN, or what stands "
            "beside it, such as the gradient 0 where all labels are ignored. Give inputs of which "
            "results are numbers"
        )
    return (
        "no element of an input decides a result: all that is computed is of tensors without "
        "elements, such as the sum of none. Give inputs that have elements"
    )


def _describe_cut(actual: ProgramRun, expected: ProgramRun) -> str:
    """Return which result only one program cuts from autograd; "" if there is none.

    Training would then differ although the numbers are equal: neither program has computed
    gradients.
    """
    if actual.trains is None or expected.trains is None:
        return ""
    cut = sorted(actual.trains ^ expected.trains)
    if not cut:
        return ""
    side = "expected" if cut[0] in actual.trains else "actual"
    return (
        f"the numbers of {cut[0]} are equal, but the {side} program cuts it from autograd, and no "
        "gradient is compared: call backward() in both, or detach it in both"
    )


KNOWN = "depends on no abstract input"


def first_difference(
    actual: Mapping[Key, Result], expected: Mapping[Key, Result]
) -> FirstDifference | None:
    """Return the first result that differs, in the order of the expected ones."""
    for name, rank in expected:
        if (name, rank) not in actual:
            says = "is not written to" if name.endswith(AFTERWARDS) else "is missing"
            return FirstDifference(name, rank, says=says)
        found = _difference(name, rank, actual[name, rank], expected[name, rank])
        if found is not None:
            return found
    for name, rank in actual:
        if (name, rank) not in expected:
            says = "is written to" if name.endswith(AFTERWARDS) else "is not expected"
            return FirstDifference(name, rank, says=says)
    return None


def _difference(
    name: str, rank: int | None, actual: Result, expected: Result
) -> FirstDifference | None:
    if actual.equals(expected):
        return None
    found, wanted = actual.elements, expected.elements
    if actual.dtype != expected.dtype:
        return FirstDifference(name, rank, says=f"{actual.dtype}, expected {expected.dtype}")
    if found.shape != wanted.shape:
        return FirstDifference(
            name, rank, says=f"shape {list(found.shape)}, expected {list(wanted.shape)}"
        )
    if actual.is_known != expected.is_known:
        known = "actual" if actual.is_known else "expected"
        return FirstDifference(name, rank, says=f"the {known} one {KNOWN}")

    # As integers, since known numbers may be NaN or zeros of both signs.
    places = (as_integers(found) != as_integers(wanted)).nonzero()
    if not len(places):
        return None
    element = tuple(places[0].tolist())
    return FirstDifference(name, rank, element, len(places), found.numel())


def _apart_in_real_numbers(kind: str, actual: ProgramRun, expected: ProgramRun) -> str:
    """Return how the real numbers of two runs contradict a proof; "" if they do not.

    They do if something computes where no dispatch mode sees it, as NumPy does. Where abstract
    elements were compared, the real numbers took the branch of the elements, and mean nothing.
    """
    if actual.arithmetic.decisions or expected.arithmetic.decisions:
        return ""
    floats: dict[Key, Tensor] = {}
    for key, real in expected.real.items():
        if real.is_floating_point() and real.numel():
            floats[key] = real

    largest_real = max((magnitude(real) for real in floats.values()), default=0.0)
    coarsest = max(actual.arithmetic.coarsest, expected.arithmetic.coarsest)
    for (name, rank), wanted in floats.items():
        found = actual.real.get((name, rank))
        if found is None or found.shape != wanted.shape:
            continue
        if kind == "identical":
            if not Result(found, found.dtype, True).equals(Result(wanted, wanted.dtype, True)):
                return f"the bits of {name} differ"
            continue
        # A result near zero may be what large numbers leave, and then has their errors.
        if are_apart(found, wanted, coarsest, least=1e-3 * largest_real):
            where = "" if rank is None else f" on rank {rank}"
            return (
                f"the real numbers of {name}{where} are apart, though the elements are equal: "
                "rounding leaves no digit, or something computes where no dispatch mode sees it"
            )

    return ""


def _lost_digits(runs: Sequence[ProgramRun]) -> str:
    """Return which of two programs loses digits; ``runs`` are theirs on the same numbers."""
    keys = []
    for key, real in runs[1].real.items():
        if not real.is_floating_point() or not real.numel():
            continue
        results = [run.results.get(key) for run in runs]
        others = [run.real.get(key) for run in runs]
        for result in results:
            others.append(None if result is None or result.is_known else result.elements)
        if all(other is not None and other.shape == real.shape for other in others):
            keys.append(key)
    own = [{key: run.real[key] for key in keys} for run in runs]
    exact = [{key: numbers_of(run.results[key].elements) for key in keys} for run in runs]
    return lost_digits(own, exact)


def _assumptions(runs: Sequence[ProgramRun], drawn: str) -> tuple[str, ...]:
    found = [drawn] if drawn else []
    constant = []
    for (name, rank), result in runs[1].results.items():
        if result.is_known and result.dtype.is_floating_point and result.elements.numel():
            constant.append(name if rank is None else f"{name} of rank {rank}")

    if constant:
        found.append(f"{spell_some(constant)} depend on no abstract input: their numbers are equal")

    reads = sum(sum(run.reads.values()) for run in runs)
    found += taken_on_trust([run.arithmetic for run in runs], reads)
    return tuple(found)


def _equal(
    kind: Any,
    programs: Sequence[Program],
    answer: _Answer,
    failed: tuple[str, ProgramRun, ProgramRun] | None,
    seconds: dict[str, float],
    drawn: str,
) -> Proof:
    first, origin = None, ""
    if failed is not None:
        first = _first_difference_on_all_ranks(programs, failed[1], failed[2])
        origin = find_origin(programs, failed[0], first, failed[1].arithmetic)
    assumes = _assumptions(answer.runs, drawn)
    assumes += describe_known(sorted({*programs[0].known(), *programs[1].known()}))
    if answer.unchecked:
        assumes += (answer.unchecked,)
    assumes += _assumed_of_launches(programs) + _assumed_of_state(programs)
    assumes += _assumed_of_empty(programs, answer.runs) + _assumed_of_nan(programs, answer.runs[1])
    return Proof(
        kind,
        compared=_count_results(programs, answer.runs[1]),
        first=first,
        origin=origin,
        assumes=assumes,
        seconds=seconds,
    )


def _assumed_of_launches(programs: Sequence[Program]) -> tuple[str, ...]:
    """Say how many collectives' results nobody reads, if these numbers differ."""
    unread = []
    for program in programs:
        gm = program.gm if isinstance(program, GraphProgram) else None
        unread.append(len(unread_launches(gm)) if gm is not None else 0)
    if unread[0] == unread[1]:
        return ()
    many = f"{unread[0]} and {unread[1]} collectives"
    return (f"nobody reads the results of {many}, and what they cost is not compared",)


def _assumed_of_foreign_operators(
    graphs: Sequence[fx.GraphModule], assumes: Sequence[str]
) -> tuple[str, ...]:
    """Name operators of other libraries in shared parts, which no arithmetic has met."""
    names = set()
    for gm in graphs:
        for node in gm.graph.nodes:
            if isinstance(node.target, OpOverload) and node.target.namespace not in _OF_TORCH:
                names.add(str(node.target))
    return describe_opaque(sorted(name for name in names if name not in " ".join(assumes)))


_OF_TORCH = ("aten", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def _assumed_of_state(programs: Sequence[Program]) -> tuple[str, ...]:
    """Name the inputs of graphs that the traced code held: no proof compares their numbers."""
    names: dict[str, None] = {}
    for program in programs:
        if isinstance(program, GraphProgram):
            inputs = program.gm.graph.find_nodes(op="placeholder")
            names.update(dict.fromkeys(input_fqn(node) for node in inputs if holds_state(node)))
    if not names:
        return ()
    stand = "inputs of a graph that the traced code held stand for any numbers"
    held = f"so that what each side held is not compared ({spell_some(list(names))})"
    return (Unchecked(f"{stand}, {held}"),)


def _assumed_of_empty(programs: Sequence[Program], runs: Sequence[ProgramRun]) -> tuple[str, ...]:
    """Name inputs, results and operators' tensors that have no elements."""
    results = []
    for (name, _), result in runs[1].results.items():
        if not result.is_known and not result.elements.numel():
            results.append(name)
    arithmetics = [run.arithmetic for run in runs]
    return describe_empty(arithmetics, results, in_world=_is_in_world(programs))


def _assumed_of_nan(programs: Sequence[Program], run: ProgramRun) -> tuple[str, ...]:
    """Name results of which elements are NaN for any numbers."""
    counts: dict[str, int] = {}
    for (name, _), is_nan in _nan_for_any_numbers(programs, run).items():
        counts[name] = counts.get(name, 0) + int(is_nan.sum())
    found = []
    for name, count in counts.items():
        if count:
            found.append(f"{count} of {name}")
    if not found:
        return ()
    return (
        Unchecked(f"elements that are NaN are equal, whatever computes them: {spell_some(found)}"),
    )


def _is_in_world(programs: Sequence[Program]) -> bool:
    """Return whether ranks run these programs, simulated or real ones."""
    program = programs[1]
    if not isinstance(program, GraphProgram):
        return False
    return program.world is not None or isinstance(program, GraphOnRanks)


def _count_results(programs: Sequence[Program], run: ProgramRun) -> int:
    """Count the results on all ranks, also where one rank has run for all."""
    program, count = programs[1], len(run.results)
    ranks = {rank for _, rank in run.results} - {None}
    if len(ranks) == 1 and isinstance(program, GraphProgram) and program.world is not None:
        # One rank has run for all. Its results count once for each of the others, too.
        others = net_of_any(program.world).size - 1
        count += others * sum(rank is not None for _, rank in run.results)
    return sum(program.gather_from_all_ranks(count))  # each real rank has its own results


def _different(
    programs: Sequence[Program],
    kind: str,
    actual: ProgramRun,
    expected: ProgramRun,
    seconds: dict[str, float],
) -> Proof:
    """Return the proof of two programs that differ in ``kind``, the weakest one that was tried.

    They are another function, unless an operator of unknown meaning, or numbers that agree in
    float64, leave that open.
    """
    first = _first_difference_on_all_ranks(programs, actual, expected)
    compared = _count_results(programs, expected)
    if first is None:
        reason = f"not {kind}: {_apart_in_real_numbers(kind, actual, expected)}"
        return Proof("unknown", compared, reason=reason, seconds=seconds)

    own_operators = unlike_operators([actual.arithmetic], [expected.arithmetic])
    unlike = sorted(set().union(*programs[0].gather_from_all_ranks(own_operators)))
    origin = find_origin(programs, kind, first, actual.arithmetic)
    factor = None
    if first.element is not None and kind in ("reordered", "rounds elsewhere"):
        key = first.result, first.rank
        own = None
        if key in actual.results:  # of other real ranks there is nothing here
            found, wanted = actual.results[key], expected.results[key]
            if not found.is_known and not wanted.is_known:
                own = common_factor(found.elements, wanted.elements)
        factors = programs[0].gather_from_all_ranks(own)
        factor = next((each for each in factors if each is not None), None)

    if unlike and factor is None and first.element is not None:
        reason = describe_unlike(unlike)
        return Proof("unknown", compared, first, origin, reason=reason, seconds=seconds)

    weakest = kind == "rounds elsewhere"
    # Float64 numbers may agree only where neither dtypes nor shapes differ.
    if weakest and (first.element is not None or first.says.endswith(KNOWN)):

        def compare(numbers: Numbers) -> Difference:
            return _compare_in_numbers(programs, numbers, [])

        decisions = actual.arithmetic.decisions + expected.arithmetic.decisions
        reason = agreement(compare, decides=_on_any_rank(programs, decisions > 0))
        if reason:
            return Proof("unknown", compared, first, origin, reason=reason, seconds=seconds)
    return Proof(
        "another function" if weakest else "unknown",
        compared=compared,
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
    programs: Sequence[Program], kind: str, first: FirstDifference | None, like: Arithmetic
) -> str:
    """Run both programs again, and return where their difference begins.

    Args:
        like: an arithmetic of the runs that differ; elements get the same order again.
    """
    if first is None or first.element is None:
        return ""
    arithmetics = [_ATTEMPTS[kind][0].arithmetic() for _ in programs]
    for arithmetic in arithmetics:
        arithmetic.order_as(like)

    expected_elements = AllElements()
    trail = Trail(expected_elements)
    try:
        with facts.watching({"node": expected_elements.by_node.enter_node}):
            programs[1].run(arithmetics[1], expected_elements)
        with facts.watching({"node": trail.enter_node}):
            programs[0].run(arithmetics[0], trail)
        tensor = programs[0].last.get((first.result, first.rank))
        origin = "" if tensor is None else trail.origin_of(tensor, first.rank)
    except NoMeaning:
        origin = ""  # the search reads more tensors than the programs do, such as sparse ones
    return _first_reason_of_all_ranks(programs, origin)


def emit_proof(proof: Proof) -> None:
    """Note a proof for the summary, with what it takes on trust."""
    facts.emit("verdict", outcome=proof.kind, tensors=proof.compared, what="proof")
    emit_assumptions(proof)


def emit_assumptions(*proofs: Proof) -> None:
    """Note for the summary what proofs that hold take on trust, each assumption once."""
    holding = [proof for proof in proofs if proof.kind in KINDS]
    for assumption in dict.fromkeys(each for proof in holding for each in proof.unchecked):
        facts.emit("assumed", what=str(assumption))  # xdist and torchrun send no other class


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
    emit_proof(proof)
    if not proof.is_at_least(at_least):
        lines = [f"expected at least {at_least!r}", str(proof)]
        lines += _explain_by_passes(actual, expected, inputs, world, at_least)
        raise AnotherFunction("\n".join(lines), proof)
    return proof


def _explain_by_passes(actual: Any, expected: Any, *options: Any) -> list[str]:
    """Return what watchers know about the pass that makes another function.

    Only a graph that ``apply_graph_passes`` returned has passes.

    Args:
        options: ``inputs``, ``world`` and ``at_least`` of the proof that failed.
    """
    explanations: list[str] = []
    sides = []
    for name, given, other in ("actual", actual, expected), ("expected", expected, actual):
        gm = getattr(given, "gm", given)
        if isinstance(gm, fx.GraphModule) and gm.meta.get("gt_passes"):
            sides.append((name, gm, other))
    if sides:
        facts.notify("unproven", sides=sides, options=options, explanations=explanations)
    return explanations
