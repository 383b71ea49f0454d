"""Bitwise comparisons: a graph before and after a pass, and a compiled function with eager."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.compiling import guards_allow
from pytest_gtrainer._torch.graph_text import expression, hint
from pytest_gtrainer._torch.random_states import random_state, random_states_kept
from pytest_gtrainer._torch.values import pytree, storage_id
from pytest_gtrainer.bisect import (
    Bisection,
    Stage,
    bisect_extremes,
    bisect_stages,
    local_run,
)
from pytest_gtrainer.compiling.record import CompileRecord, RecordedPass
from pytest_gtrainer.compiling.recorder import gt_compile
from pytest_gtrainer.graph.collectives import find_early_read
from pytest_gtrainer.graph.nodes import AFTERWARDS, input_fqn, is_collective, refuse_fake
from pytest_gtrainer.graph.same_on_ranks import nodes_within
from pytest_gtrainer.numerics.bits import span
from pytest_gtrainer.numerics.compare import (
    BitwiseDifference,
    ControlFailed,
    compare,
    compare_control,
)
from pytest_gtrainer.numerics.graph_inputs import sample_tensor
from pytest_gtrainer.numerics.graph_run import (
    attributes_of,
    copies,
    has_storage,
    inputs_afterwards,
    named_outputs,
    only_nan,
    random_states_afterwards,
    run_graph,
    why_nothing_shows,
)
from pytest_gtrainer.numerics.verdict import Verdict
from pytest_gtrainer.passes.graph_pass import check_waits
from pytest_gtrainer.proofs.proof import kind_in_words
from pytest_gtrainer.proofs.prove import prove
from pytest_gtrainer.proofs.state import HeldState

Sizes = Mapping[Any, int]
"""Values of the symbols of a graph's dynamic sizes."""

SMALL = 1e-3
"""Scale of every fourth row of generated inputs: in large ones the eps of a norm vanishes."""
MOST_TRIED = 64  # sizes that are held against the guards


class SameGraph(ValueError):
    """The graphs before and after a pass are the same, so a comparison proves nothing."""


@facts.check
def assert_pass_bitwise(
    run: RecordedPass | tuple[fx.GraphModule, fx.GraphModule], *, seeds: Sequence[int] = (0, 1)
) -> None:
    """Fail unless the graphs before and after a pass give the same bits with kernels of eager.

    Compared are outputs, inputs and attributes as the graphs leave them, and the states of random
    generators; and which results lie in the memory of an input or of another result.

    The inputs are those of the first call, if recorded, and for each seed normal numbers, every
    fourth row divided by 1000 (integers are 0 and 1, which may be indices). Dynamic sizes are the
    example, its double and one more, or the next sizes that guards allow. The outputs for two seeds
    must differ, or no difference could be seen. Then elements of the inputs are replaced by large,
    infinite, NaN, zero, subnormal and equal numbers, and rows by large negative ones and -inf;
    there all NaNs are equal. Integers become as large as the graph before the pass takes them.
    Inputs that share memory share it in each run.

    Args:
        run: a recorded pass, or a pair of graphs.
        seeds: two or more seeds of generated inputs.

    Raises:
        BitwiseDifference: an output, or a state that a graph leaves, differs; with the first node
            whose value does, and the nodes that the pass made there. Or the graph after the pass
            raises an error on inputs that the graph before it takes.
        ControlFailed: the outputs do not depend on the inputs, or one of them is NaN on all of
            them.
        SameGraph: the pass changed nothing: both are one graph, or copies of one.
        RuntimeError: the graph after the pass reads a collective's result before a wait.
        ValueError: under a fake process group, whose collectives move no data; fewer than two
            seeds; an input that cannot be made up; guards that forbid all other sizes than the
            example.
    """
    __tracebackhide__ = True
    recorded: dict[str, Any] = {}
    if isinstance(run, RecordedPass):
        before, after = run.before, run.after
        what = f"{run.name} on the {run.stage} graph {run.compiled.id}"
        is_same = before is after  # a record has one object, if nothing changed
        recorded = _recorded_inputs(run)
    else:
        before, after = run
        what = "the pass"
        is_same = before is after or _are_copies(before, after)

    if is_same:
        raise SameGraph(f"{what} changed nothing: take record.passes(..., changed=True)")
    if isinstance(seeds, int):
        raise TypeError(f"seeds={seeds}: give the seeds themselves, such as range({seeds})")
    if len(set(seeds)) < 2:
        raise ValueError(
            f"seeds={list(seeds)}: give two different ones, to see that the outputs depend on the "
            "inputs"
        )

    refuse_fake(before, what)
    if find_early_read(before.graph) is None:
        check_waits(after.graph, what)
    stages = [Stage("", before), Stage(what, after)]
    first: list[Any] = []
    of_seeds: list[dict[str, Tensor]] = []
    nan: list[set[str]] = []
    for description, flat in _generate_inputs(before, recorded, seeds):
        first = first or flat
        outputs = _find_outputs(before, flat)
        nan.append(set(only_nan(outputs)))
        if description.startswith("seed"):
            of_seeds.append(outputs)
        _require_equal(bisect_stages(stages, local_run(flat)), description, what, stages, flat)

    found = bisect_extremes(stages, local_run, first)
    _require_equal(found, found.inputs or "inputs with extreme values", what, stages, first)
    for extreme in found.silent:
        idle = f"{what}: every output is NaN on {extreme}, so these inputs prove nothing"
        facts.emit("idle", what=idle)
    _refuse_new_aliases(before, after, what, first)
    # The control comes last: one rank alone may fail it, and nothing after it communicates.
    control = compare_control(of_seeds[0], of_seeds[1])
    always_nan = set.intersection(*nan)
    if always_nan:
        raise ControlFailed(
            f"{what}: nothing but NaN on all inputs, so no difference could be seen: "
            f"{', '.join(sorted(always_nan))}. "
            "Record a call whose results are numbers, with lower=False",
            control,
        )

    if control.outcome != "different":
        raise ControlFailed(
            f"{what}: outputs for two seeds are {control.outcome}: this check cannot fail\n"
            f"{control}",
            control,
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


def _require_equal(
    found: Bisection,
    description: str,
    what: str,
    stages: Sequence[Stage],
    flat: Sequence[Any],
) -> None:
    """Raise if a pass has changed bits, with the kind of equal that the graphs are."""
    __tracebackhide__ = True
    before, after = stages[0].gm, stages[1].gm
    outcome = "equal" if found.verdict is None else found.verdict.outcome
    facts.emit(
        "verdict",
        outcome=outcome,
        tensors=len(before.graph.output_node().all_input_nodes),
        what=what,
    )
    if found.verdict is not None:
        if found.refuses:
            raise BitwiseDifference(f"{what}, on {description}: {found.refuses}", found.verdict)
        lines = [f"{what} changed the numbers, on {description}"]
        if not any(map(is_collective, nodes_within(before))):  # other ranks may have other answers
            inputs = copies([list(flat)])[0]
            lines.append(
                kind_in_words(
                    lambda: prove(after, before, inputs=inputs),
                    nodes=len(before.graph.nodes),
                    call="prove(after, before), of the graphs after and before the pass,",
                )
            )
        message = "\n".join([*lines, str(found.verdict), str(found)])
        raise BitwiseDifference(message, found.verdict)


def _refuse_new_aliases(
    before: fx.GraphModule, after: fx.GraphModule, what: str, flat: Sequence[Any]
) -> None:
    """Raise if a result lies in the memory of an input or of another result, and did not before.

    Its bits are equal until somebody writes to one of the two.
    """
    __tracebackhide__ = True
    known = _find_aliases(before, flat)
    for name, owner in _find_aliases(after, flat):
        if (name, owner) not in known:
            why = f"{name} lies in the memory of {owner}: a write to one changes the other"
            verdict = Verdict("different", reasons=(why,))
            facts.emit("verdict", outcome="different", tensors=1, what=what)
            raise BitwiseDifference(f"{what} returns a view in place of a copy\n{why}", verdict)


def _find_aliases(gm: fx.GraphModule, flat: Sequence[Any]) -> list[tuple[str, str]]:
    """Return each result that shares memory, with the input or earlier result it shares it with."""
    run = run_graph(gm, flat)
    owners: dict[int, str] = {}
    for name, tensor in run.state.items():
        if has_storage(tensor):
            owners.setdefault(storage_id(tensor), name.removesuffix(AFTERWARDS))
    found = []
    for name, tensor in run.outputs.items():
        if has_storage(tensor) and tensor.numel():
            owner = owners.setdefault(storage_id(tensor), name)
            if owner != name:
                found.append((name, owner))
    return found


def _find_outputs(gm: fx.GraphModule, flat: Sequence[Any]) -> dict[str, Tensor]:
    """Run a graph; return its outputs and the inputs that it wrote to.

    The other inputs differ between seeds by themselves, so they prove nothing as a control.
    """
    run = run_graph(gm, flat)
    found = dict(run.outputs)
    for name, given in inputs_afterwards(gm, flat).items():
        if compare(run.state[name], given).outcome != "equal":
            found[name] = run.state[name]
    return found


def _recorded_inputs(run: RecordedPass) -> dict[str, Any]:
    """Return the inputs of the first call by name."""
    # The inputs of the joint graph begin with those of the forward.
    stage = "backward" if run.stage == "backward" else "forward"
    if stage not in run.compiled.inputs:
        return {}
    placeholders = getattr(run.compiled, stage).graph.find_nodes(op="placeholder")
    return dict(zip(map(input_fqn, placeholders), run.compiled.inputs[stage], strict=True))


def _generate_inputs(
    gm: fx.GraphModule, recorded: Mapping[str, Any], seeds: Sequence[int]
) -> Iterator[tuple[str, list[Any]]]:
    """Yield inputs with a description: recorded ones, then for all sizes those of each seed."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    if recorded and all(input_fqn(node) in recorded for node in placeholders):
        yield "the inputs of the first call", [recorded[input_fqn(node)] for node in placeholders]
    dynamic = []
    for node in placeholders:
        value = node.meta.get("val")
        numbers = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
        dynamic += [number for number in numbers if isinstance(number, torch.SymInt)]

    every_size: list[Sizes] = [{}]
    if dynamic:
        every_size = [_find_sizes(dynamic, *change) for change in ((1, 0), (2, 0), (1, 1))]
    for sizes in every_size:
        shown = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
        for seed in seeds:
            # Recorded indices are of the sizes of the recorded call.
            if shown:
                inputs = _generate(placeholders, {}, sizes, seed)
                yield f"seed {seed} with {shown}", inputs
            else:
                yield f"seed {seed}", _generate(placeholders, recorded, sizes, seed)


def _find_sizes(numbers: Sequence[torch.SymInt], times: int, more: int) -> Sizes:
    """Return ``times`` the example size plus ``more`` by symbol, or the next that guards allow.

    The example of a symbol without one is 4.

    Raises:
        ValueError: the guards forbid the first ``MOST_TRIED`` sizes.
    """
    examples: dict[Any, int] = {}
    for number in numbers:
        for symbol in sorted(expression(number).free_symbols, key=str):
            examples.setdefault(symbol, int(hint(symbol, number) or 4))
    if (times, more) == (1, 0):
        return examples
    for further in range(MOST_TRIED):
        sizes = {symbol: times * size + more + further for symbol, size in examples.items()}
        if all(guards_allow(number, sizes) for number in numbers):
            return sizes

    shown = ", ".join(f"{symbol} = {times * size + more}" for symbol, size in examples.items())
    raise ValueError(
        f"the guards of the graph forbid {shown} and the {MOST_TRIED - 1} sizes after it: "
        "no other size than the example can be tried, so compile with dynamic=False"
    )


_RANK_STRIDE = 1_000_003  # between the seeds of two ranks


def _rank() -> int:
    """Return the rank of this process: equal numbers on all ranks would hide a lost average."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _generate(
    placeholders: Sequence[fx.Node], recorded: Mapping[str, Any], sizes: Sizes, seed: int
) -> list[Any]:
    """Return a value for each placeholder; random ones for tensors of floating-point numbers."""
    generator = torch.Generator().manual_seed(seed + _RANK_STRIDE * _rank())

    def number(value: Any) -> int:
        known = expression(value)
        return int(known.xreplace(sizes)) if hasattr(known, "xreplace") else int(known)

    made: list[Any] = []
    for node in placeholders:
        value, known = node.meta.get("val"), recorded.get(input_fqn(node))
        if isinstance(value, Tensor):
            is_float = value.dtype.is_floating_point or value.dtype.is_complex
            if not is_float and isinstance(known, Tensor):
                made.append(known)  # indices of the recorded call are in range
                continue
            shape = [number(extent) for extent in value.shape]
            strides = [number(stride) for stride in value.stride()]
            made.append(sample_tensor(value, shape, strides, generator, small=SMALL))
        elif isinstance(value, int | torch.SymInt):
            made.append(number(value))
        elif known is not None:
            made.append(known)
        else:
            raise ValueError(
                f"input {input_fqn(node)} is of type {type(value).__name__}, for which no value "
                "can be made up: record with lower=False, which keeps the inputs of the first call"
            )
    return _sharing_memory(made, [node.meta.get("val") for node in placeholders], number)


def _sharing_memory(
    made: list[Any], examples: Sequence[Any], number: Callable[[Any], int]
) -> list[Any]:
    """Return made-up inputs, with one memory for those whose examples are views of one tensor."""
    places: dict[int, list[int]] = {}
    for at, example in enumerate(examples):
        if isinstance(example, Tensor) and example.layout is torch.strided:
            places.setdefault(storage_id(example), []).append(at)
    for shared in places.values():
        offsets = [number(examples[at].storage_offset()) for at in shared]
        ends = []
        for at, offset in zip(shared, offsets, strict=True):
            length = span(made[at].shape, made[at].stride())
            ends.append((offset + length) * made[at].itemsize)
        memory = made[shared[0]].new_empty(max(*ends, 0), dtype=torch.uint8).untyped_storage()
        for at, offset in zip(shared, offsets, strict=True):
            view = made[at].new_empty(0).set_(memory, offset, made[at].shape, made[at].stride())
            made[at] = view.copy_(made[at])
    return made


def _check_readable(outputs: Any) -> None:
    for leaf in pytree.tree_leaves(outputs):
        if leaf is not None and not isinstance(leaf, _READABLE):
            name = type(leaf).__name__
            raise TypeError(
                f"the function returns a {name}, in which nothing can be compared: return tensors, "
                f"in tuples, lists and dicts, or register {name} as a pytree "
                "(torch.utils._pytree.register_dataclass for a dataclass)"
            )


_READABLE = (Tensor, bool, int, float, complex, str, torch.dtype, torch.device)


@facts.check
def assert_compiled_bitwise(function: Callable[..., Any], *inputs: Any) -> Verdict:
    """Fail unless ``function(*inputs)``, compiled by Inductor, has the bits of eager.

    If the graph run with kernels of eager differs, a decomposition or a pass is the cause, else the
    generated code. Outputs are compared, what was written to, and the states of random generators.
    Written to may be inputs, parameters, buffers and attributes of modules, tensors that the
    function holds, and gradients, if the call has a backward of its own. All runs begin with the
    same random states, with copies of the inputs, and with modules, and what else the function
    holds, as they were; afterwards they are so again.

    Raises:
        BitwiseDifference: they differ, with the cause and the operators of the graph; or no
            difference could be seen, because an output is NaN in every element, or all are empty.
        NotRecorded: nothing was compiled.
        ValueError: a collective under a fake process group, which moves no data.
        TypeError: a result is an object that is no pytree.
    """
    __tracebackhide__ = True
    leaves, spec = pytree.tree_flatten(inputs)

    def run(called: Callable[..., Any]) -> dict[str, Tensor]:
        arguments = pytree.tree_unflatten(copies(leaves, keep_grad=True), spec)
        held = HeldState(function, leaves)
        try:
            with random_states_kept():
                outputs = called(*arguments)
                _check_readable(outputs)
                found = named_outputs(outputs)
                random_states = random_states_afterwards(random_state())
            found |= _written_inputs(arguments, copies(leaves)) | held.written() | random_states
            return {name: leaf.detach().clone() for name, leaf in found.items()}
        finally:
            held.put_back()

    graphs: CompileRecord | None = None
    expected = run(function)
    # Kernels of eager first: if these differ, the generated code is not the cause.
    for lower, cause in ((False, "decomposition, or a pass"), (True, "code generation")):
        with gt_compile(lower=lower) as record:
            actual = run(torch.compile(function))
        first = record[0]  # raises if nothing was compiled
        for graph in record:
            refuse_fake(graph.stages.get("joint", graph.dynamo), f"compiled graph {graph.id}")
        graphs = graphs or record  # that of the first run has its inputs
        verdict = compare(actual, expected)
        nothing = why_nothing_shows(expected)
        if verdict.outcome == "equal" and nothing:
            verdict = replace(verdict, outcome="unverified", reasons=(nothing,))
        facts.emit(
            "verdict",
            outcome=verdict.label,
            tensors=verdict.compared,
            what="compiled against eager",
        )
        if verdict.outcome == "unverified":
            raise BitwiseDifference(
                f"compiled against eager: no difference could be seen\n{verdict}\n"
                "Give inputs for which the results are tensors of numbers",
                verdict,
            )
        if verdict.outcome != "equal":
            nodes = first.stages.get("forward", first.dynamo).graph.nodes
            operators = {str(node.target) for node in nodes if node.op == "call_function"}
            raise BitwiseDifference(
                f"compiled against eager: {cause} changed the numbers\n"
                f"{_kind_of_stages(graphs, is_code=lower)}\n{verdict}\n"
                f"in a graph of {', '.join(sorted(operators))}",
                verdict,
            )
    return verdict


def _written_inputs(arguments: Sequence[Any], before: Sequence[Any]) -> dict[str, Tensor]:
    """Return the inputs that a call has changed or added, also in lists and dicts, and their
    gradients.
    """
    found: dict[str, Tensor] = {}
    for place, leaf in enumerate(pytree.tree_leaves(arguments)):
        if not isinstance(leaf, Tensor):
            continue
        known = before[place] if place < len(before) else None
        if not isinstance(known, Tensor) or compare([leaf], [known]).outcome == "different":
            found[f"input {place}, which is written to"] = leaf
        if leaf.is_leaf and leaf.grad is not None:
            found[f"gradient of input {place}"] = leaf.grad
    return found


def _kind_of_stages(record: CompileRecord, *, is_code: bool) -> str:
    """Return in a line which kind of equal the graphs of a compilation are to eager."""
    nodes = 0
    for graph in record:
        for gm in graph.stages.values():
            nodes = max(nodes, len(gm.graph.nodes))
    line = kind_in_words(
        lambda: record.prove().weakest, nodes=nodes, call="gt_compile() and record.prove()"
    )
    if is_code:
        line += "; of generated code: assert_no_less_accurate(torch.compile(f), f, *inputs)"
    return line
