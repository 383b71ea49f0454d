"""The record of ``gt_compile``: graphs by stage, passes, graph breaks, compilations, code."""

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pytest_gtrainer import facts
from pytest_gtrainer.compiling.proving import CompileProof, StageProof, prove_stages
from pytest_gtrainer.facts import FailedCheck, check_switches, check_type, counted
from pytest_gtrainer.proofs.proof import AnotherFunction
from pytest_gtrainer.proofs.prove import check_kind, emit_assumptions
from pytest_gtrainer.worlds.simulate import AnyWorld

STAGES = {
    "dynamo": "the graph that Dynamo gave to Inductor",
    "joint": "the joint graph of forward and backward, before Inductor's passes; of inference the "
    "forward",
    "joint_after_passes": "the joint graph after Inductor's passes",
    "forward": "the forward graph, as the partitioner left it",
    "forward_after_passes": "the forward graph after the post-grad passes",
    "backward": "the backward graph, as the partitioner left it",
    "backward_after_passes": "the backward graph after the post-grad passes",
}
"""The stages of a compiled graph, in the order in which they are reached."""

_LATE = "it was first compiled after the block had ended: call backward() inside the block"

# Collectives, operators that are called as in eager, kernels of libraries, and fused kernels.
_LAUNCH = re.compile(
    r"torch\.ops\.(_c10d_functional\.\w+)\.\w+\(|torch\.ops\.([\w.]+)\(|"
    r"(extern_kernels\.\w+)\(|\b((?:cpp_fused|triton)_\w+?)(?:\.run)?\("
)


class NotRecorded(LookupError):
    """The record lacks the requested stage, graph or pass; the message says why."""

    __module__ = "pytest_gtrainer"


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """One pass on one graph.

    Attributes:
        name: the class or function of a user's pass; Inductor's name of its own pass.
        slot: the setting that holds a user's pass, as ``post_grad_custom_post_pass``; else the
            name.
        stage: "pre_grad", "joint", "forward" or "backward".
        before, after: the graph; the same object if the pass changed nothing.
        compiled: the compiled graph.
        seconds: the time that it took.
    """

    name: str
    slot: str
    stage: str
    before: fx.GraphModule
    after: fx.GraphModule
    compiled: "CompiledGraph" = field(repr=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def changed(self) -> bool:
        """True if the pass changed an operator, an operand or a value."""
        return self.before is not self.after

    @property
    def gm(self) -> fx.GraphModule:
        """The graph after the pass, which ``gt_golden.check(run)`` checks."""
        return self.after

    @property
    def gt_stage(self) -> str:
        """The name of its golden: the stage and the pass."""
        return f"{self.stage}.{self.name}"

    @property
    def inputs(self) -> list[Any] | None:
        """The inputs of the graph's first call, if it runs with kernels of eager."""
        return self.compiled.inputs.get(self.stage)


@dataclass(slots=True, repr=False)
class CompiledGraph:
    """One graph that Dynamo gave to a backend.

    Attributes:
        id: Dynamo's, "0/1" for the second compilation of the first frame.
        stages: graphs by stage, see ``STAGES``; each is an attribute, too: ``compiled.backward``.
        place: its index in the record.
        lower: as for ``gt_compile``.
        passes: the runs of passes, in order.
        code: Inductor's generated code, by "forward" and "backward".
        inputs: copies of the inputs of the first call, by "forward" and "backward".
        is_late: whether the backward was first compiled after the block.
    """

    id: str
    place: int
    lower: bool
    stages: dict[str, fx.GraphModule] = field(default_factory=dict)
    passes: list[RecordedPass] = field(default_factory=list)
    code: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, list[Any]] = field(default_factory=dict)
    is_late: bool = False

    def __repr__(self) -> str:
        return f"CompiledGraph({self.id}: {', '.join(self.stages) or 'no stage'})"

    def __getattr__(self, name: str) -> fx.GraphModule:
        if name not in STAGES:
            raise AttributeError(f"{name!r}: a compiled graph has the stages {', '.join(STAGES)}")
        if name in self.stages:
            return self.stages[name]
        why = "Inductor did not get there"
        if not self.stages:
            why = (
                "its backend is not Inductor, whose graphs alone are recorded; of another only "
                "graph breaks and compilations are"
            )
        elif name.startswith("backward") and self.is_late:
            why = _LATE
        elif name.startswith("backward"):
            why = "nothing called backward() inside the block, or no input needs a gradient"
        raise NotRecorded(f"compiled graph {self.id} has no stage {name!r}, {STAGES[name]}: {why}")

    def launches(self, direction: str = "forward") -> list[str]:
        """Return the calls of the generated code in order: collectives, library and fused kernels.

        Inductor's scheduler runs after all passes on graphs, and may use another order than the
        last graph.

        Raises:
            NotRecorded: no code was generated.
        """
        if direction not in self.code:
            why = "not compiled"
            if not self.lower:
                why = "lower=False generates none: record with gt_compile(lower=True)"
            raise NotRecorded(
                f"compiled graph {self.id} has no generated code of its {direction}: {why}"
            )

        code = self.code[direction]
        # What stands before the function ``call`` defines kernels and launches none.
        found = _LAUNCH.findall(code[code.rfind("def call") :])
        return [next(filter(None, names)).removesuffix(".default") for names in found]


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A graph break: the place, as "file.py:12", the reason, and the number of times."""

    where: str
    reason: str
    times: int = 1

    def __str__(self) -> str:
        times = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.where}: {self.reason}{times}"


@dataclass(slots=True, repr=False)
class CompileRecord:
    """The record of ``gt_compile``.

    ``record[0]`` is the first compiled graph. ``record.forward`` and the other stages are those of
    the only one.

    Attributes:
        graphs: in the order of compilation.
        breaks: graph breaks, in order.
        compiled: ids of first compilations.
        recompiled: the guards that failed, by id of the recompilation.
        cache: the number of each event of a cache.
        faults: reasons why the record is incomplete; most methods refuse it then.
    """

    graphs: list[CompiledGraph] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    recompiled: dict[str, list[str]] = field(default_factory=dict)
    cache: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"CompileRecord of {counted(len(self.graphs), 'graph')}{self._events()}"

    def __getitem__(self, place: int) -> CompiledGraph:
        check_type(place, int, "the place of a compiled graph", "a whole number")
        self._check_not_empty()
        if not -len(self.graphs) <= place < len(self.graphs):
            raise NotRecorded(
                f"there is no compiled graph {place}: {len(self.graphs)} were recorded"
            )
        return self.graphs[place]

    def __len__(self) -> int:
        return len(self.graphs)

    def __iter__(self) -> Iterator[CompiledGraph]:
        return iter(self.graphs)

    def __getattr__(self, name: str) -> fx.GraphModule:
        if name not in STAGES:
            raise AttributeError(f"{name!r}: a record has the stages {', '.join(STAGES)}")
        found: fx.GraphModule = getattr(self.only, name)
        return found

    @property
    def only(self) -> CompiledGraph:
        """The one compiled graph.

        Raises:
            NotRecorded: none was compiled, or several.
        """
        self._check_not_empty()
        if len(self.graphs) == 1:
            return self.graphs[0]
        causes = []
        if self.breaks:
            causes.append(counted(len(self.breaks), "graph break"))
        if self.recompiled:
            causes.append(counted(len(self.recompiled), "recompilation"))
        because = f", because of {' and '.join(causes)}" if causes else ""
        raise NotRecorded(
            f"{len(self.graphs)} graphs were compiled{because}: "
            f"say which, record[0].forward for one{self._events()}"
        )

    def passes(self, name: str | None = None, *, changed: bool | None = None) -> list[RecordedPass]:
        """Return the runs of a pass on all graphs, or of all passes.

        Args:
            name: the name of the pass, or the setting that holds it; None for all passes.
            changed: only runs that changed the graph, or only those that did not. If no run is
                left, the list is empty, and the summary of the test run says so.

        Raises:
            NotRecorded: no pass of that name ran.
        """
        found = self._runs_of(name, changed)
        if not found:
            # A loop over no run checks nothing.
            which = "changed" if changed else "did not change"
            facts.emit(
                "idle", what=f"record.passes: no run of {name or 'a pass'} {which} its graph"
            )
        return found

    def _runs_of(self, name: str | None, changed: bool | None) -> list[RecordedPass]:
        if changed is not None:
            check_switches(changed=changed)
        self._check_not_empty()
        runs: list[RecordedPass] = []
        for graph in self.graphs:
            if graph.is_late:
                raise NotRecorded(
                    f"the passes of the backward of compiled graph {graph.id} are not known: "
                    f"{_LATE}"
                )
            runs += graph.passes

        found = [run for run in runs if name in (None, run.name, run.slot)]
        if not found:
            ran = ", ".join(sorted({run.name for run in runs}))
            ran = ran or "none: caches give what an earlier compile made"
            raise NotRecorded(f"no pass {name!r} ran; these did: {ran}")
        return [run for run in found if changed in (None, run.changed)]

    def only_pass(self, name: str | None = None, *, changed: bool | None = None) -> RecordedPass:
        """Return the one run of a pass; ``name`` and ``changed`` are as for ``passes``.

        Raises:
            NotRecorded: it did not run, or several times. The message lists the place of each run.
        """
        found = self._runs_of(name, changed)
        if len(found) == 1:
            return found[0]
        which = ""
        if changed is not None:
            which = f" that {'changed' if changed else 'did not change'} the graph"
        way_out = "the pass matched nothing"
        if found:
            way_out = "choose one of record.passes(...), or say changed=True"
        lines = [f"{len(found)} runs of {name!r}{which}, not 1: {way_out}"]
        for run in found or self._runs_of(name, None):
            result = "changed" if run.changed else "nothing changed"
            place = f"{run.stage} of graph {run.compiled.id}"
            lines.append(f"  {run.name} ({run.slot}) in {place}, {result}")
        raise NotRecorded("\n".join(lines))

    def prove(
        self, *, at_least: str = "rounds elsewhere", world: AnyWorld | None = None
    ) -> CompileProof:
        """Return which kind of equal every stage is to the one before it, for any numbers.

        Dynamo's graph stands for eager: it runs by eager's operators, with autograd; if it holds
        DTensors, by those that reach the local tensors of this rank. AOTAutograd's decompositions,
        the passes of Inductor, the partitioner and passes of the user are proven, forward and
        backward; of a stage that is not identical the pass is named. Generated code is not: see
        ``assert_no_less_accurate``. Whole numbers are those of the first call; with ``lower=True``,
        which keeps none, they are drawn.

        Args:
            at_least: do not look for weaker kinds of equal than this one.
            world: of stages that communicate, a simulated ``World`` for the groups of its mesh. By
                default a number of ranks, as many as there are.

        Raises:
            NotRecorded: a graph has no joint graph, or its backward was compiled too late; nothing
                was compiled.
            ValueError: with ``lower=True``, a whole number whose range nobody knows.
        """
        check_kind(at_least)
        self._check_not_empty()
        stages: list[StageProof] = []
        for graph in self.graphs:
            if graph.is_late:
                raise NotRecorded(
                    f"the backward of compiled graph {graph.id} is not known: {_LATE}"
                )
            _ = graph.joint  # says why there is none
            passes = [run for run in graph.passes if run.changed]
            stages += prove_stages(graph.id, graph.stages, passes, graph.inputs, at_least, world)
        return CompileProof(tuple(stages))

    @facts.check
    def assert_same_function(
        self, at_least: str = "rounds elsewhere", *, world: AnyWorld | None = None
    ) -> CompileProof:
        """Fail unless every stage is equal to the one before it, for any numbers; see ``prove``.

        Args:
            at_least: the weakest kind of equal that passes.
            world: as for ``prove``, of stages that communicate.

        Raises:
            AnotherFunction: a stage is not of this kind, or nobody knows; with the pass.
            NotRecorded, ValueError: as ``prove``.
        """
        __tracebackhide__ = True
        check_kind(at_least)
        found = self.prove(world=world)  # also if it fails: the message then says which kind it is
        weakest = found.weakest
        compared = sum(each.proof.compared for each in found.stages)
        facts.emit("verdict", outcome=found.kind, tensors=compared, what="stages of torch.compile")
        emit_assumptions(*[stage.proof for stage in found.stages])
        if not weakest.proof.is_at_least(at_least):
            raise AnotherFunction(f"expected at least {at_least!r}\n{weakest}", weakest.proof)
        return found

    @facts.check
    def assert_no_graph_breaks(self) -> None:
        """Fail if Dynamo left the graph anywhere, with each place and reason.

        Raises:
            AssertionError: it did.
            NotRecorded: nothing was compiled, so nothing could break.
        """
        __tracebackhide__ = True
        if self.breaks:
            lines = [f"{counted(len(self.breaks), 'graph break')}:"]
            lines += [f"  {found}" for found in self.breaks]
            raise FailedCheck("\n".join(lines))
        self._check_not_empty()

    @facts.check
    def assert_compiles(self, graphs: int, recompiles: int = 0) -> None:
        """Fail unless ``graphs`` graphs were compiled first, and ``recompiles`` again.

        Raises:
            AssertionError: other numbers; with the guards that failed and the graph breaks.
        """
        __tracebackhide__ = True
        check_type(graphs, int, "graphs", "a whole number")
        check_type(recompiles, int, "recompiles", "a whole number")
        self._check_complete()
        first, again = len(self.compiled), len(self.recompiled)
        if (first, again) != (graphs, recompiles):
            expected = f"{counted(graphs, 'graph')} and {counted(recompiles, 'recompilation')}"
            found = f"{counted(first, 'graph')} and {counted(again, 'recompilation')}"
            raise FailedCheck(f"expected {expected}, found {found}{self._events()}")

    @facts.check
    def assert_launch_order(
        self, *names: str, direction: str = "forward", place: int | None = None
    ) -> None:
        """Fail unless the generated code launches these in this order, others between them.

        Args:
            names: collectives and kernels as ``launches`` returns them, with ``*``:
                ``"*all_gather*"``.
            direction: "forward" or "backward".
            place: the index of the compiled graph; None for the only one.

        Raises:
            AssertionError: one does not come after the one before it.
            NotRecorded: no code was generated.
            ValueError: no name, or one only, so that there is no order.
        """
        __tracebackhide__ = True
        if len(names) < 2:
            raise ValueError(f"an order needs two names or more, and these are {len(names)}")
        launches = (self.only if place is None else self[place]).launches(direction)
        rest = iter(launches)
        for number, name in enumerate(names):
            for launch in rest:
                # The pattern may be of the whole name, or of the last part.
                if fnmatch.filter((launch, launch.rpartition(".")[2]), name):
                    break
            else:
                behind = f" after {names[number - 1]!r}" if number else ""
                listed = "\n".join(f"  {i:3} {each}" for i, each in enumerate(launches))
                raise FailedCheck(
                    f"the {direction} does not launch {name!r}{behind}; it launches\n{listed}"
                )

    def _check_not_empty(self) -> None:
        self._check_complete()
        if not self.graphs:
            raise NotRecorded(
                "nothing was compiled inside the block: call the compiled function in it, not only "
                "torch.compile, and with inputs that were not compiled for before"
                f"{self._events() if self.breaks else ''}"
            )

    def _check_complete(self) -> None:
        if self.faults:
            raise NotRecorded(self.faults[0])

    def _events(self) -> str:
        """Return compilations and graph breaks, each on a line of its own, for messages."""
        lines = [f"compiled {each}" for each in self.compiled]
        lines += [f"recompiled {each}: {'; '.join(why)}" for each, why in self.recompiled.items()]
        lines += [f"graph break at {each}" for each in self.breaks]
        return "".join(f"\n  {line}" for line in lines)
