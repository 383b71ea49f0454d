"""What a recorder of torch.compile leaves: graphs by stage, passes, graph breaks, compilations, code."""

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pytest_gtrainer.facts import counted

STAGES = {
    "dynamo": "the graph that Dynamo gave to Inductor",
    "joint": "the joint graph of forward and backward, before Inductor's passes; of inference the forward",
    "joint_after_passes": "the joint graph behind Inductor's passes",
    "forward": "the forward graph, as the partitioner left it",
    "forward_after_passes": "the forward graph behind the post-grad passes",
    "backward": "the backward graph, as the partitioner left it",
    "backward_after_passes": "the backward graph behind the post-grad passes",
}
"""The stages of a compiled graph, in the order in which they are reached."""

_LATE = "it was first compiled after the block had ended: call backward() inside the block"

_LAUNCH = re.compile(
    r"torch\.ops\.(_c10d_functional\.\w+)\.\w+\(|torch\.ops\.([\w.]+)\(|"
    r"(extern_kernels\.\w+)\(|\b((?:cpp_fused|triton)_\w+?)(?:\.run)?\("
)


class NotRecorded(LookupError):
    """A stage was asked for that the record has not; the message says why."""

    __module__ = "pytest_gtrainer"


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """One pass on one graph.

    Attributes:
        name: of a user's pass its class or function, of Inductor's own its name there.
        slot: the setting that holds a user's pass, ``post_grad_custom_post_pass`` for one; else the name.
        stage: "pre_grad", "joint", "forward" or "backward".
        before, after: the graph; the same object if the pass changed nothing.
        seconds: how long it ran.
        inputs: what the graph was first called with, if it runs with kernels of eager.
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
        """Whether an operator, an operand or a value is another behind the pass."""
        return self.before is not self.after

    @property
    def gm(self) -> fx.GraphModule:
        """The graph behind the pass: what ``gt_golden.check(run)`` checks."""
        return self.after

    @property
    def gt_stage(self) -> str:
        """The name of its golden: the stage and the pass."""
        return f"{self.stage}.{self.name}"

    @property
    def inputs(self) -> list[Any] | None:
        return self.compiled.inputs.get(self.stage)


@dataclass(slots=True, repr=False)
class CompiledGraph:
    """One graph that Dynamo gave to a backend.

    Attributes:
        id: Dynamo's, "0/1" for the second compilation of the first frame.
        stages: graphs by stage, see ``STAGES``; each is an attribute, too: ``compiled.backward``.
        passes: what ran, in order.
        code: by "forward" and "backward", what Inductor generated.
        inputs: by "forward" and "backward", copies of what was first called with.
        is_late: whether the backward was first compiled behind the block.
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
        if (found := self.stages.get(name)) is not None:
            return found
        why = "Inductor did not get there"
        if not self.stages:
            why = "its backend is not Inductor, whose graphs alone are recorded; graph breaks and compilations are told"
        elif name.startswith("backward") and self.is_late:
            why = _LATE
        elif name.startswith("backward"):
            why = "nothing called backward() inside the block, or no input needs a gradient"
        raise NotRecorded(f"compiled graph {self.id} has no stage {name!r}, {STAGES[name]}: {why}")

    def launches(self, direction: str = "forward") -> list[str]:
        """What the generated code calls, in order: collectives, kernels of libraries, fused kernels.

        Inductor's scheduler comes behind all passes on graphs, and may order otherwise than the last graph says.
        A NotRecorded is raised if no code was generated.
        """
        if direction not in self.code:
            why = (
                "lower=False generates none: record with gt_compile(lower=True)"
                if not self.lower
                else "not compiled"
            )
            raise NotRecorded(
                f"compiled graph {self.id} has no generated code of its {direction}: {why}"
            )
        code = self.code[direction]
        found = _LAUNCH.findall(code[code.rfind("def call") :])
        return [next(filter(None, names)).removesuffix(".default") for names in found]


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where Dynamo left the graph, "file.py:12", and why; ``times`` it did."""

    where: str
    reason: str
    times: int = 1

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f" ({self.times} times)" if self.times > 1 else "")


@dataclass(slots=True, repr=False)
class CompileRecord:
    """What ``gt_compile`` recorded.

    ``record[0]`` is the first compiled graph. ``record.forward`` and the other stages are those of the only one.

    Attributes:
        graphs: in the order of compilation.
        breaks: graph breaks, in order.
        compiled: ids of what was compiled for the first time.
        recompiled: by id of what was compiled again, the guards that had failed.
        cache: how often each event of a cache was told.
    """

    graphs: list[CompiledGraph] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    recompiled: dict[str, list[str]] = field(default_factory=dict)
    cache: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"CompileRecord of {counted(len(self.graphs), 'graph')}{self._story()}"

    def __getitem__(self, place: int) -> CompiledGraph:
        self._refuse_nothing()
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
        self._refuse_nothing()
        if len(self.graphs) > 1:
            pairs = (("graph break", self.breaks), ("recompilation", self.recompiled))
            causes = " and ".join(counted(len(found), noun) for noun, found in pairs if found)
            told = f"{len(self.graphs)} graphs were compiled{f', because of {causes}' if causes else ''}"
            raise NotRecorded(f"{told}: say which, record[0].forward for one{self._story()}")
        return self.graphs[0]

    def passes(self, name: str | None = None, *, changed: bool | None = None) -> list[RecordedPass]:
        """The runs of a pass on all graphs, by its name or by the setting that holds it; of all passes without one.

        Args:
            changed: only those that changed the graph, or only those that did not.

        Raises:
            NotRecorded: no pass of that name ran.
        """
        self._refuse_nothing()
        if late := next((graph for graph in self.graphs if graph.is_late), None):
            raise NotRecorded(
                f"the passes of the backward of compiled graph {late.id} are not known: {_LATE}"
            )
        every = [run for graph in self.graphs for run in graph.passes]
        if not (found := [run for run in every if name in (None, run.name, run.slot)]):
            ran = (
                ", ".join(sorted({run.name for run in every}))
                or "none: caches give what an earlier compile made"
            )
            raise NotRecorded(f"no pass {name!r} ran; these did: {ran}")
        return [run for run in found if changed in (None, run.changed)]

    def only_pass(self, name: str | None = None, *, changed: bool | None = None) -> RecordedPass:
        """The one run of a pass; ``name`` and ``changed`` are as for ``passes``.

        Raises:
            NotRecorded: it ran not at all, or several times; with the place of each run.
        """
        found = self.passes(name, changed=changed)
        if len(found) == 1:
            return found[0]
        runs = found or self.passes(name)
        places = []
        for run in runs:
            result = "changed" if run.changed else "nothing changed"
            places.append(
                f"  {run.name} ({run.slot}) in {run.stage} of graph {run.compiled.id}, {result}"
            )
        asked = (
            ""
            if changed is None
            else f" that {'changed' if changed else 'did not change'} the graph"
        )
        way_out = (
            "choose one of record.passes(...), or say changed=True"
            if found
            else "the pass matched nothing"
        )
        raise NotRecorded(
            "\n".join([f"{len(found)} runs of {name!r}{asked}, not 1: {way_out}", *places])
        )

    def assert_no_graph_breaks(self) -> None:
        """Fail if Dynamo left the graph anywhere, with each place and reason.

        Raises:
            AssertionError: it did.
            NotRecorded: nothing was compiled, so nothing could break.
        """
        __tracebackhide__ = True
        if self.breaks:
            found = counted(len(self.breaks), "graph break")
            raise AssertionError("\n".join([f"{found}:", *(f"  {each}" for each in self.breaks)]))
        self._refuse_nothing()

    def assert_compiles(self, graphs: int, recompiles: int = 0) -> None:
        """Fail unless so many graphs were compiled for the first time, and so many again.

        Raises:
            AssertionError: other numbers; with the guards that failed and the graph breaks.
        """
        __tracebackhide__ = True
        self._refuse_faults()
        numbers = ((graphs, recompiles), (len(self.compiled), len(self.recompiled)))
        if numbers[0] != numbers[1]:
            told = (
                f"{counted(n, 'graph')} and {counted(again, 'recompilation')}"
                for n, again in numbers
            )
            raise AssertionError(f"expected {', found '.join(told)}{self._story()}")

    def assert_launch_order(
        self, *names: str, direction: str = "forward", place: int | None = None
    ) -> None:
        """Fail unless the generated code launches these in this order, others between them.

        Args:
            names: of collectives and kernels as ``launches`` tells them, with ``*``: ``"*all_gather*"``.
            place: which compiled graph; the only one without it.

        Raises:
            AssertionError: one does not come behind the one before it.
            NotRecorded: no code was generated.
            ValueError: no name, or one only, so that there is no order.
        """
        __tracebackhide__ = True
        if len(names) < 2:
            raise ValueError(f"an order needs two names or more, and these are {len(names)}")
        launches = (self.only if place is None else self[place]).launches(direction)
        at = 0
        for number, name in enumerate(names):
            told_as = ((launch, launch.rpartition(".")[2]) for launch in launches[at:])
            found = next(
                (at + i for i, told in enumerate(told_as) if fnmatch.filter(told, name)), None
            )
            if found is None:
                behind = f" behind {names[number - 1]!r}" if number else ""
                told = "\n".join(f"  {i:3} {each}" for i, each in enumerate(launches))
                raise AssertionError(
                    f"the {direction} does not launch {name!r}{behind}; it launches\n{told}"
                )
            at = found + 1

    def _refuse_nothing(self) -> None:
        self._refuse_faults()
        if not self.graphs:
            raise NotRecorded(
                "nothing was compiled inside the block: call the compiled function in it, not only torch.compile, and "
                f"with inputs that were not compiled for before{self._story() if self.breaks else ''}"
            )

    def _refuse_faults(self) -> None:
        if self.faults:
            raise NotRecorded(self.faults[0])

    def _story(self) -> str:
        """What happened, each on a line of its own."""
        lines = [f"compiled {each}" for each in self.compiled]
        lines += [f"recompiled {each}: {'; '.join(why)}" for each, why in self.recompiled.items()]
        return "".join(
            f"\n  {line}" for line in [*lines, *(f"graph break at {each}" for each in self.breaks)]
        )
