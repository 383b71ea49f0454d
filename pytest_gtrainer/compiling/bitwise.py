"""A graph before and after a pass, on the same inputs, bit for bit; and a compiled function against eager."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.compiling import guards_allow
from pytest_gtrainer._torch.graph_text import expression, hint
from pytest_gtrainer._torch.random_states import GeneratorStates, random_state, random_states_kept
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.bisect import (
    Bisection,
    Stage,
    bisect_extremes,
    bisect_stages,
    copies,
    local_run,
)
from pytest_gtrainer.compiling.record import RecordedPass
from pytest_gtrainer.compiling.recorder import gt_compile
from pytest_gtrainer.graph.nodes import refuse_fake
from pytest_gtrainer.numerics.compare import BitwiseDifference, ControlFailed, compare
from pytest_gtrainer.numerics.graph_inputs import sample_tensor
from pytest_gtrainer.numerics.graph_run import (
    attributes_of,
    inputs_afterwards,
    named_outputs,
    only_nan,
    random_states_afterwards,
    run_graph,
)
from pytest_gtrainer.numerics.verdict import Verdict

Sizes = Mapping[Any, int]  # what each symbol of a graph's dynamic sizes is

SMALL = 1e-3
"""Every fourth row of generated inputs is so much smaller: the eps of a norm, which others round away, counts there."""
MOST_TRIED = 64  # how many sizes are tried before it is said that guards allow none


class SameGraph(ValueError):
    """A pass is to be held against what it changed, and it changed nothing."""


def assert_pass_bitwise(
    run: RecordedPass | tuple[fx.GraphModule, fx.GraphModule], *, seeds: Sequence[int] = (0, 1)
) -> None:
    """Fail unless the graphs before and after ``run`` (or a pair of graphs) give the same bits, with kernels of eager.

    Compared are outputs, inputs and attributes as the graphs leave them, and the states of random generators.

    The inputs are those of the first call, if recorded, and for each seed normal numbers, every fourth row divided by
    1000 (integers are 0 and 1, which may be indices). Dynamic sizes are the example, its double and one more, or the
    next sizes that guards allow. The outputs for two seeds must differ, or no difference could be seen. Then elements
    of the inputs are replaced by large, infinite, NaN, zero and subnormal numbers; there all NaNs are equal.

    Raises:
        BitwiseDifference: an output, or what a graph leaves, differs; with the first node whose value does, and what
            the pass made there.
        ControlFailed: the outputs do not depend on the inputs, or one of them is NaN on all of them.
        SameGraph: the pass changed nothing: both are one graph, or copies of one.
        ValueError: under a fake process group, whose collectives move no data; fewer than two seeds; an input that
            cannot be made up; guards that forbid all other sizes than the example.
    """
    __tracebackhide__ = True
    before, after = (run.before, run.after) if isinstance(run, RecordedPass) else run
    what = (
        f"{run.name} on the {run.stage} graph {run.compiled.id}"
        if isinstance(run, RecordedPass)
        else "the pass"
    )
    if before is after or (not isinstance(run, RecordedPass) and _are_copies(before, after)):
        raise SameGraph(f"{what} changed nothing: take record.passes(..., changed=True)")
    if len(set(seeds)) < 2:
        raise ValueError(
            f"seeds={list(seeds)}: give two different ones, to see that the outputs depend on the inputs"
        )
    refuse_fake(before, what)
    recorded = _recorded(run) if isinstance(run, RecordedPass) else {}
    stages = [Stage("", before), Stage(what, after)]
    first: list[Any] = []
    of_seeds: list[dict[str, Tensor]] = []
    nan: set[str] | None = None  # outputs that are nothing but NaN on all inputs so far
    for description, flat in _inputs(before, recorded, seeds):
        first = first or flat
        outputs = _depending_on_inputs(before, flat)
        nan = {*only_nan(outputs)} if nan is None else nan.intersection(only_nan(outputs))
        if description.startswith("seed"):
            of_seeds.append(outputs)
        _require_equal(bisect_stages(stages, local_run(flat)), description, what, before)
    found = bisect_extremes(stages, local_run, first)
    _require_equal(found, found.inputs or "inputs with extreme values", what, before)
    for each in found.silent:
        facts.emit(
            "idle", what=f"{what}: every output is NaN on {each}, so these inputs prove nothing"
        )
    # The control comes last: one rank alone may fail it, and nothing behind it communicates.
    control = compare(of_seeds[0], of_seeds[1])
    if nan:
        wrong = f"{what}: nothing but NaN on all inputs, so no difference could be seen: {', '.join(sorted(nan))}"
        raise ControlFailed(
            f"{wrong}. Record a call whose results are numbers, with lower=False", control
        )
    if control.outcome != "different":
        raise ControlFailed(
            f"{what}: outputs for two seeds are {control.outcome}: this check cannot fail", control
        )


def _are_copies(before: fx.GraphModule, after: fx.GraphModule) -> bool:
    """Return whether two graphs have the same nodes in the same order, and hold equal tensors."""
    described, held = [], []
    for gm in (before, after):
        lines: list[Any] = []
        for name, part in gm.named_modules():
            if isinstance(part, fx.GraphModule):
                for node in part.graph.nodes:
                    lines.append((name, node.op, node.target, repr((node, node.args, node.kwargs))))
            else:
                lines.append((name, repr(part)))
        described.append(lines)
        held.append(dict(attributes_of(gm)))
    return described[0] == described[1] and compare(*held).outcome != "different"


def _require_equal(found: Bisection, description: str, what: str, before: fx.GraphModule) -> None:
    __tracebackhide__ = True
    outcome = "equal" if found.verdict is None else found.verdict.outcome
    facts.emit(
        "verdict",
        outcome=outcome,
        tensors=len(before.graph.output_node().all_input_nodes),
        what=what,
    )
    if found.verdict is not None:
        changed = f"{what} changed the numbers, on {description}"
        raise BitwiseDifference(f"{changed}\n{found.verdict}\n{found}", found.verdict)


def _depending_on_inputs(gm: fx.GraphModule, flat: Sequence[Any]) -> dict[str, Tensor]:
    """The outputs, and those inputs that the graph wrote to: the others differ between seeds by themselves."""
    run = run_graph(gm, copies(flat), GeneratorStates.now())
    found = dict(run.outputs)
    for name, given in inputs_afterwards(gm, flat).items():
        if compare(run.state[name], given).outcome != "equal":
            found[name] = run.state[name]
    return found


def _recorded(run: RecordedPass) -> dict[str, Any]:
    """What the graph was first called with, by name: the joint graph begins with the forward's inputs."""
    stage = "backward" if run.stage == "backward" else "forward"
    if (values := run.compiled.inputs.get(stage)) is None:
        return {}
    return dict(
        zip(
            map(_name, getattr(run.compiled, stage).graph.find_nodes(op="placeholder")),
            values,
            strict=True,
        )
    )


def _name(node: fx.Node) -> str:
    return str(node.meta.get("gt_input", {}).get("fqn", node.target))


def _inputs(
    gm: fx.GraphModule, recorded: Mapping[str, Any], seeds: Sequence[int]
) -> Iterator[tuple[str, list[Any]]]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    if recorded and all(_name(node) in recorded for node in placeholders):
        yield "the inputs of the first call", [recorded[_name(node)] for node in placeholders]
    values = [node.meta.get("val") for node in placeholders]
    every = [
        n for v in values for n in ((*v.shape, *v.stride()) if isinstance(v, Tensor) else (v,))
    ]
    numbers = [number for number in every if isinstance(number, torch.SymInt)]  # the dynamic sizes
    changes = ((1, 0), (2, 0), (1, 1))  # the example, its double, one more
    for sizes in [_allowed(numbers, *change) for change in changes] if numbers else [{}]:
        shown = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
        for seed in seeds:
            told = f"seed {seed}" + (f" with {shown}" if shown else "")
            yield told, _generated(placeholders, {} if shown else recorded, sizes, seed)


def _allowed(numbers: Sequence[torch.SymInt], times: int, more: int) -> Sizes:
    """By symbol ``times`` the example (4 if it has none) and ``more``, or the next larger that the guards allow."""
    examples: dict[Any, int] = {}
    for number in numbers:
        for symbol in sorted(expression(number).free_symbols, key=str):
            examples.setdefault(symbol, int(hint(symbol, number) or 4))
    for further in range(MOST_TRIED if (times, more) != (1, 0) else 1):
        sizes = {symbol: times * size + more + further for symbol, size in examples.items()}
        if all(guards_allow(number, sizes) for number in numbers) or (times, more) == (1, 0):
            return sizes
    shown = ", ".join(f"{symbol} = {times * size + more}" for symbol, size in examples.items())
    wrong = f"the guards of the graph forbid {shown} and the {MOST_TRIED - 1} sizes after it"
    raise ValueError(
        f"{wrong}: no other size than the example can be tried, so compile with dynamic=False"
    )


def _generated(
    placeholders: Sequence[fx.Node], recorded: Mapping[str, Any], sizes: Sizes, seed: int
) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)

    def number(value: Any) -> int:
        known = expression(value)
        return int(known.xreplace(sizes)) if hasattr(known, "xreplace") else int(known)

    made: list[Any] = []
    for node in placeholders:
        value, known = node.meta.get("val"), recorded.get(_name(node))
        if isinstance(value, Tensor):
            shape, strides = (
                [number(extent) for extent in value.shape],
                [number(each) for each in value.stride()],
            )
            exact = value.dtype.is_floating_point or value.dtype.is_complex
            if not exact and isinstance(known, Tensor):
                made.append(known)  # indices of the real call are in range
                continue
            made.append(sample_tensor(value, shape, strides, generator, small=SMALL))
        elif isinstance(value, int | torch.SymInt):
            made.append(number(value))
        elif known is not None:
            made.append(known)
        else:
            wrong = f"input {_name(node)} is of type {type(value).__name__}, for which no value can be made up"
            raise ValueError(
                f"{wrong}: record with lower=False, which keeps the inputs of the first call"
            )
    return made


def assert_compiled_bitwise(function: Callable[..., Any], *inputs: Any) -> Verdict:
    """Fail unless ``function(*inputs)``, compiled by Inductor, has the bits of eager, and say what changed them.

    If the graph run with kernels of eager differs, a decomposition or a pass is the cause, else the generated code.
    Outputs are compared, inputs that were written to, and the states of random generators. Gradients
    are not; call it in a function that returns them. All runs begin with the same random states, and
    with copies of the inputs.

    Raises:
        BitwiseDifference: they differ, with what broke it and the operators of the graph.
        NotRecorded: nothing was compiled.
        ValueError: a collective under a fake process group, which moves no data.
    """
    __tracebackhide__ = True
    leaves, spec = pytree.tree_flatten(inputs)

    def run(called: Callable[..., Any]) -> dict[str, Tensor]:
        given = copies(leaves, keep_grad=True)
        with random_states_kept():
            found = named_outputs(called(*pytree.tree_unflatten(given, spec)))
            random_states = random_states_afterwards(random_state())
        for n, (leaf, before) in enumerate(zip(given, copies(leaves), strict=True)):
            if isinstance(leaf, Tensor) and compare([leaf], [before]).outcome == "different":
                found[f"input {n}, which is written to"] = leaf
        found |= random_states
        return {name: leaf.detach().clone() for name, leaf in found.items()}

    expected = run(function)
    for lower, told in ((False, "decomposition, or a pass"), (True, "code generation")):
        with gt_compile(lower=lower) as record:
            actual = run(torch.compile(function))
        record[0]  # refuses that nothing was compiled
        for graph in record:
            refuse_fake(graph.stages.get("joint", graph.dynamo), f"compiled graph {graph.id}")
        verdict = compare(actual, expected)
        facts.emit(
            "verdict",
            outcome=verdict.label,
            tensors=verdict.compared,
            what="compiled against eager",
        )
        if verdict.outcome != "equal":
            first = record[0].stages.get("forward", record[0].dynamo)
            operators = sorted(
                {str(node.target) for node in first.graph.nodes if node.op == "call_function"}
            )
            head = f"compiled against eager: {told} changed the numbers"
            raise BitwiseDifference(
                f"{head}\n{verdict}\nin a graph of {', '.join(operators)}", verdict
            )
    return verdict
