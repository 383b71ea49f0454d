"""Prove the stages of a compilation: each against the one before it, from Dynamo's graph on.

Every stage is made a function of the same inputs: those of Dynamo's graph, and a gradient for each
output (a *tangent*). Dynamo's graph runs with autograd; the joint graph computes both directions;
after the partitioner the backward gets what the forward keeps for it. Results are the outputs, the
gradients of the inputs, and what is written to inputs. A stage that is not identical to the one
before is looked for in the passes between them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, fx

from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.arithmetic.values import NoMeaning
from pytest_gtrainer.compiling.eager import EagerTrace, flat_size, holds_dtensors
from pytest_gtrainer.facts import counted
from pytest_gtrainer.graph.collectives import results_of
from pytest_gtrainer.graph.nodes import held, input_fqn, is_collective, is_random, value_of
from pytest_gtrainer.graph.same_on_ranks import nodes_within
from pytest_gtrainer.proofs.inputs import describe_integers, draw_inputs
from pytest_gtrainer.proofs.programs import NamedProgram
from pytest_gtrainer.proofs.proof import KINDS, Proof
from pytest_gtrainer.proofs.prove import prove, prove_programs
from pytest_gtrainer.worlds.simulate import AnyWorld
from pytest_gtrainer.worlds.simulated.interpreter.program import NodeByNode

Call = Callable[[dict[str, Any]], dict[str, Tensor]]
_WEAKEST_LAST = (*KINDS, "another function", "unknown")
_TANGENT = "gradient."
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_COMMUNICATES = " communicates, and "


class PassRun(Protocol):
    """A recorded pass."""

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def before(self) -> fx.GraphModule: ...
    @property
    def after(self) -> fx.GraphModule: ...


@dataclass(frozen=True, slots=True)
class StageProof:
    """The kind of equal that a stage is to the one before it.

    Attributes:
        graph: the id of the compiled graph.
        stage, before: their names, as in ``record.joint_after_passes``.
        by: the first pass between them that is of no stronger kind; "" if none is.
    """

    graph: str
    stage: str
    before: str
    proof: Proof
    by: str = ""

    @property
    def kind(self) -> str:
        return self.proof.kind

    def __str__(self) -> str:
        by = f", by {self.by}" if self.by else ""
        return f"{self.stage} of graph {self.graph} against {self.before}{by}: {self.proof}"


@dataclass(frozen=True, slots=True)
class CompileProof:
    """The kind of equal that every stage of a record is to the one before it.

    Attributes:
        stages: of all graphs, in order.
    """

    stages: tuple[StageProof, ...]

    @property
    def weakest(self) -> StageProof:
        """The first stage of the weakest kind."""
        return max(self.stages, key=lambda each: _WEAKEST_LAST.index(each.proof.kind))

    @property
    def kind(self) -> str:
        """The weakest kind of all stages: that of what Inductor generates code from, to eager."""
        return self.weakest.proof.kind

    def __str__(self) -> str:
        head = f"{self.kind}: {counted(len(self.stages), 'stage')}"
        return "\n".join([head, *(f"  {each}".replace("\n", "\n  ") for each in self.stages)])


def prove_stages(
    graph: str,
    stages: Mapping[str, fx.GraphModule],
    passes: Sequence[PassRun],
    recorded: Mapping[str, Sequence[Any]],
    at_least: str,
    world: AnyWorld | None = None,
) -> Iterator[StageProof]:
    """Yield a proof for each stage of one compiled graph that a pass has changed.

    Args:
        stages: by name; "joint" is one of them.
        recorded: the inputs of the first call of "forward" and "backward".
        at_least: do not look for weaker kinds.
        world: of stages that communicate; by default as many ranks as there are.
    """
    layout = _Layout(stages, recorded, world)
    states: list[tuple[str, str, dict[str, fx.GraphModule]]] = []
    current: dict[str, fx.GraphModule] = {}
    for name, of_pass in _ORDER:
        if name not in stages or (name == "backward" and not layout.has_backward):
            continue
        role = name.removesuffix("_after_passes")
        current = {**current, role: stages[name]}
        if name == "forward" and layout.has_backward:
            continue  # the partitioner makes both
        states.append((name if name != "backward" else "forward and backward", of_pass, current))
    for (before, _, expected), (stage, of_pass, actual) in pairwise(states):
        if expected == actual:
            continue  # no pass has changed it
        proof = layout.prove(actual, expected, at_least)
        by = ""
        if proof.kind != "identical" and _COMMUNICATES not in proof.reason:
            by = _find_pass(layout, passes, of_pass, actual, proof, at_least)
        yield StageProof(graph, stage, before, proof, by)


_ORDER = (
    ("dynamo", ""),
    ("joint", "pre_grad"),
    ("joint_after_passes", "joint"),
    ("forward", ""),
    ("backward", ""),
    ("forward_after_passes", "forward"),
    ("backward_after_passes", "backward"),
)
"""Stages, each with the stage of the passes that lead to it."""


def _find_pass(
    layout: "_Layout",
    passes: Sequence[PassRun],
    stage: str,
    graphs: dict[str, fx.GraphModule],
    proof: Proof,
    at_least: str,
) -> str:
    """Return the first pass that is of no stronger kind than all passes together; "" if none is."""
    role = "dynamo" if stage == "pre_grad" else stage
    if role == "dynamo":
        graphs = {}
    elif role == "joint":
        graphs = {role: graphs[role]}
    if proof.kind in KINDS:
        # That a pass is of no stronger kind shows without a look for its own, which takes longest.
        at_least = KINDS[KINDS.index(proof.kind) - 1]
    for run in passes:
        if run.stage != stage or run.before is run.after:
            continue
        before, after = {**graphs, role: run.before}, {**graphs, role: run.after}
        own = layout.prove(after, before, at_least)
        if _WEAKEST_LAST.index(own.kind) >= _WEAKEST_LAST.index(proof.kind):
            return run.name
    return ""


class _Layout:
    """Inputs and outputs of the graphs of a compilation, by position.

    Attributes:
        inputs: of all stages, by name: those of Dynamo's graph, then the tangents.
        primals: names of Dynamo's inputs.
        tangents: names of the gradients of outputs.
        drawn: what was made up of the inputs, in words.
    """

    def __init__(
        self,
        stages: Mapping[str, fx.GraphModule],
        recorded: Mapping[str, Sequence[Any]],
        world: AnyWorld | None,
    ) -> None:
        self._world = world
        joint = stages["joint"]
        self._placeholders = placeholders = joint.graph.find_nodes(op="placeholder")
        self.has_backward = "backward" in stages
        self._programs: dict[tuple[int, ...], NamedProgram] = {}
        self._forward = stages.get("forward", joint)
        known: dict[str, Any] = {}
        for stage, values in recorded.items():
            given = stages[stage].graph.find_nodes(op="placeholder")
            known |= {node.name: value for node, value in zip(given, values, strict=True)}
        self.drawn = ""
        self._are_recorded = True
        wanted = [node.name for node in placeholders]
        if all(name in known or name.startswith("tangents") for name in wanted):
            values = [known.get(node.name, _like(node.meta.get("val"))) for node in placeholders]
        else:
            values = draw_inputs(joint, seed=0)
            self._are_recorded = False
            self.drawn = describe_integers(joint, values)
        self.inputs: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        for node, value in zip(placeholders, values, strict=True):
            key = input_fqn(node)
            if key in self.inputs:
                key = f"{key} ({node.name})"
            self._keys[node.name] = key
            self.inputs[key] = value
        self.tangents = [key for key in self.inputs if key.startswith(_TANGENT)]
        self.primals = [key for key in self.inputs if not key.startswith(_TANGENT)]
        self._given = [value_of(node) for node in _inputs_of(stages.get("dynamo"))]
        if sum(map(flat_size, self._given)) != len(self.primals):
            self._given = [None] * len(self.primals)
        outputs, self._gradients = self._split(results_of(joint))
        self._n_outputs = len(outputs)

    def _split(self, results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the outputs, and one gradient for each input of Dynamo's graph.

        A gradient that is a DTensor is its local tensor, followed by the mesh; without a gradient
        there is one None, so they are counted from the end.
        """
        outputs = list(results)
        gradients: list[Any] = []
        for given in reversed(self._given if self.tangents else ()):
            size = 1 if outputs[-1] is None else flat_size(given)
            gradients.insert(0, outputs[-size])
            del outputs[-size:]
        return outputs, gradients

    @property
    def _trained(self) -> list[bool]:
        """Return for each input of Dynamo's graph whether its gradient is a result.

        Also of those of which AOTAutograd has none: a pass before it may have cut them off.
        """
        if not self._gradients:
            return [False] * len(self._given)
        trained = []
        for given, gradient in zip(self._given, self._gradients, strict=True):
            trained.append(gradient is not None or getattr(given, "requires_grad", False))
        return trained

    def prove(
        self,
        actual: Mapping[str, fx.GraphModule],
        expected: Mapping[str, fx.GraphModule],
        at_least: str,
    ) -> Proof:
        """Return which kind of equal two states of a compilation are."""
        proof = self._prove(actual, expected, at_least)
        draws = [_random_operators(each) for each in (expected, actual)]
        if proof.kind == "another function" and draws[0] != draws[1]:
            shown = " and ".join(", ".join(each) or "functions of torch" for each in draws)
            return Proof("unknown", reason=f"random numbers are drawn by {shown}, and not alike")
        return proof

    def _prove(
        self,
        actual: Mapping[str, fx.GraphModule],
        expected: Mapping[str, fx.GraphModule],
        at_least: str,
    ) -> Proof:
        for gm in (*_running(actual), *_running(expected)):
            found = [node.name for node in nodes_within(gm) if is_collective(node)]
            if holds_dtensors(gm):
                found.append("a DTensor")
            if found:
                return self._prove_on_ranks(actual, expected, at_least, found[0])
        programs = [self._program(each) for each in (actual, expected)]
        try:
            return prove_programs(programs, drawn=self.drawn, at_least=at_least)
        except Exception as error:
            # A stage that does not run on its own proves nothing; the other stages still may.
            text = str(error).partition("\n")[0]
            return Proof("unknown", reason=f"{type(error).__name__}: {text}")

    def _prove_on_ranks(
        self,
        actual: Mapping[str, fx.GraphModule],
        expected: Mapping[str, fx.GraphModule],
        at_least: str,
        name: str,
    ) -> Proof:
        """Return which kind of equal two states are on all ranks of the world, as one graph each.

        Args:
            name: of a node that communicates.
        """
        world = self._world
        if world is None and not dist.is_initialized():
            reason = f"{name}{_COMMUNICATES}the world of its ranks is gone: give world="
            return Proof("unknown", reason=reason)
        try:
            graphs = [self._as_one_graph(each) for each in (actual, expected)]
            if graphs[0] is not None and graphs[1] is not None:
                if world is None:
                    world = dist.get_world_size()
                if not any(map(_communicates, graphs)):
                    world = None  # a mesh of one rank, or DTensors that nobody redistributes
                inputs: Any = self._inputs_of_rank if self._are_recorded else None
                if inputs is not None and world is None:
                    inputs = inputs(0)
                return prove(graphs[0], graphs[1], inputs=inputs, world=world, at_least=at_least)
        except Exception as error:
            text = str(error).partition("\n")[0]
            way_out = "" if self._world else "; a simulated world has meshes: world=gt_world"
            return Proof("unknown", reason=f"{name}{_COMMUNICATES}{text}{way_out}")
        reason = f"{name}{_COMMUNICATES}a graph that calls modules runs on one rank alone"
        return Proof("unknown", reason=reason)

    def _inputs_of_rank(self, rank: int) -> list[Any]:
        """Return the recorded inputs, with other fractions on each rank, and no meshes."""
        values = []
        for value in self.inputs.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value.detach() * (1 + rank / 8)
            values.append(value if isinstance(value, Tensor | int | float) else None)
        return values

    def _as_one_graph(self, graphs: Mapping[str, fx.GraphModule]) -> fx.GraphModule | None:
        """Return a graph from the inputs of the joint graph to its results; None if it has none."""
        parts = [graphs[role] for role in ("forward", "backward") if role in graphs]
        if not parts and "joint" in graphs:
            parts = [graphs["joint"]]
        if not parts:
            return self._traced_eager(graphs["dynamo"])
        if any(gm.graph.find_nodes(op="call_module") for gm in parts):
            return None
        whole = fx.GraphModule({}, fx.Graph())
        values: dict[str, Any] = {}
        for node in self._placeholders:
            values[node.name] = whole.graph.node_copy(node)
        results: list[Any] = []
        for gm in parts:
            own = _append(whole, gm, values)
            if len(parts) == 2 and not results:
                # What the forward keeps has the names that the partitioner gave it.
                for node, value in zip(results_of(self._forward), own, strict=True):
                    if isinstance(node, fx.Node):
                        values.setdefault(node.name, value)
                own = own[: self._n_outputs]
            results += own
        if not self.has_backward:  # after the outputs is what the forward keeps
            return self._with_results(whole, results[: self._n_outputs], [])
        return self._with_results(whole, *self._split(results))

    def _traced_eager(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return Dynamo's graph as operators on local tensors, from the joint graph's inputs."""
        values = list(self.inputs.values())
        n_primals = len(self.primals)
        traced = EagerTrace(gm, self._trained, n_primals, self._n_outputs).trace(values)
        whole = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        given = iter(traced.graph.find_nodes(op="placeholder"))
        for node, value in zip(self._placeholders, values, strict=True):
            copy = whole.node_copy(node)
            if isinstance(value, Tensor):
                copies[next(given)] = copy
        results: Any = whole.graph_copy(traced.graph, copies)
        outputs, gradients = results[: self._n_outputs], results[self._n_outputs :]
        if not self.has_backward:
            gradients = []
        return self._with_results(fx.GraphModule(traced, whole), outputs, gradients)

    def _with_results(
        self, gm: fx.GraphModule, outputs: Sequence[Any], gradients: Sequence[Any]
    ) -> fx.GraphModule:
        """End a graph with named results, None for the meshes of DTensors and other objects."""
        tensors: list[Any] = []
        for node in (*outputs, *gradients):
            value = value_of(node) if isinstance(node, fx.Node) else node
            if isinstance(value, _NUMBERS):
                # A number, as of a dynamic size, that a graph returns.
                node = gm.graph.call_function(torch.ops.aten.scalar_tensor.default, (node,))
                node.meta["val"] = torch.empty((), device="meta")
                value = node.meta["val"]
            tensors.append(node if isinstance(value, Tensor) else None)
        names = [f"output {place}" for place in range(len(outputs))]
        place = 0
        for given in self._given if gradients else ():
            names.append(f"gradient of {self.primals[place]}")
            place += flat_size(given)
        gm.graph.output(tuple(tensors)).meta["gt_outputs"] = tuple(names)
        gm.recompile()
        return gm

    def _program(self, graphs: Mapping[str, fx.GraphModule]) -> NamedProgram:
        key = tuple(map(id, graphs.values()))  # the record keeps all of them
        if key not in self._programs:
            self._programs[key] = NamedProgram(self._call(graphs), self.inputs)
        return self._programs[key]

    def _call(self, graphs: Mapping[str, fx.GraphModule]) -> Call:
        if "forward" in graphs:
            return lambda given: self._run_parts(graphs, given)
        if "joint" in graphs:
            return lambda given: self._run_joint(graphs["joint"], given)
        return lambda given: self._run_dynamo(graphs["dynamo"], given)

    def _run_dynamo(self, gm: fx.GraphModule, given: dict[str, Any]) -> dict[str, Tensor]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        if len(placeholders) != len(self.primals):
            raise NoMeaning(
                f"Dynamo's graph has {counted(len(placeholders), 'input')}, that of AOTAutograd "
                f"{len(self.primals)}"
            )
        is_trained = self._trained
        values = [given[key] for key in self.primals]
        for place, trained in enumerate(is_trained):
            if trained:
                values[place] = values[place].detach().requires_grad_()
        with torch.set_grad_enabled(bool(self.tangents)):
            outputs = pytree.tree_leaves(NodeByNode(gm, None).run(*values))
        if len(outputs) != self._n_outputs:
            raise NoMeaning(
                f"Dynamo's graph has {counted(len(outputs), 'output')}, that of AOTAutograd "
                f"{self._n_outputs}: views of inputs, for example, are made after it"
            )
        gradients: Sequence[Tensor | None] = []
        if self.has_backward and self.tangents:
            ends = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
            if len(ends) != len(self.tangents):
                raise NoMeaning(
                    f"Dynamo's graph has gradients of {counted(len(ends), 'output')}, that of "
                    f"AOTAutograd of {len(self.tangents)}"
                )
            leaves = [value for value, yes in zip(values, is_trained, strict=True) if yes]
            weights = [given[key] for key in self.tangents]
            found = iter(torch.autograd.grad(ends, leaves, weights, allow_unused=True))
            gradients = [next(found) if yes else None for yes in is_trained]
        return self._named(outputs, gradients)

    def _run_joint(self, gm: fx.GraphModule, given: dict[str, Any]) -> dict[str, Tensor]:
        with torch.no_grad():
            results = pytree.tree_leaves(_run(gm, self._values(gm, given)))
        return self._named(results[: self._n_outputs], results[self._n_outputs :])

    def _run_parts(
        self, graphs: Mapping[str, fx.GraphModule], given: dict[str, Any]
    ) -> dict[str, Tensor]:
        with torch.no_grad():
            forward, gradients = graphs["forward"], []
            results = pytree.tree_leaves(_run(forward, self._values(forward, given)))
            if self.has_backward and self.tangents:
                # Passes may rename what is kept; its place among the results stays.
                kept = {}
                for node, value in zip(results_of(self._forward), results, strict=True):
                    if isinstance(node, fx.Node):
                        kept[node.name] = value
                backward = graphs["backward"]
                gradients = pytree.tree_leaves(_run(backward, self._values(backward, given, kept)))
        return self._named(results[: self._n_outputs], gradients)

    def _values(
        self, gm: fx.GraphModule, given: dict[str, Any], kept: Mapping[str, Any] | None = None
    ) -> list[Any]:
        values = []
        for node in gm.graph.find_nodes(op="placeholder"):
            if kept and node.name in kept:
                values.append(kept[node.name])
            elif node.name in self._keys:
                values.append(given[self._keys[node.name]])
            else:
                raise NoMeaning(f"nobody knows what input {node.name} of a stage is given")
        return values

    def _named(self, outputs: Sequence[Any], gradients: Sequence[Any]) -> dict[str, Tensor]:
        found = {}
        for place, leaf in enumerate(outputs):
            # A number, as of a dynamic size, that a graph returns.
            if isinstance(leaf, bool | int | float):
                leaf = torch.tensor(leaf, device="cpu")
            if isinstance(leaf, Tensor):
                found[f"output {place}"] = leaf
        if self.has_backward:
            for key, leaf in zip(self.primals, gradients, strict=False):
                if isinstance(leaf, Tensor):
                    found[f"gradient of {key}"] = leaf
        return found


def _inputs_of(gm: fx.GraphModule | None) -> list[fx.Node]:
    return [] if gm is None else list(gm.graph.find_nodes(op="placeholder"))


def _append(whole: fx.GraphModule, gm: fx.GraphModule, given: Mapping[str, Any]) -> list[Any]:
    """Add the nodes of a graph to another one, and return its results there.

    Args:
        given: by the names of its inputs.
    """
    copies: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            copies[node] = given[node.name]
        elif node.op == "get_attr":
            # Forward and backward may hold different tensors under one name.
            name = f"attribute_{len(whole.graph.nodes)}"
            setattr(whole, name, held(gm, str(node.target)))
            copies[node] = whole.graph.create_node("get_attr", name)
        elif node.op != "output":
            copies[node] = whole.graph.node_copy(node, copies.__getitem__)
    return [copies[each] if isinstance(each, fx.Node) else each for each in results_of(gm)]


def _running(graphs: Mapping[str, fx.GraphModule]) -> list[fx.GraphModule]:
    """Return the graphs of a state that run; the others are what they were made from."""
    if "forward" in graphs:
        return [graphs[role] for role in ("forward", "backward") if role in graphs]
    return [list(graphs.values())[-1]]


def _communicates(gm: fx.GraphModule) -> bool:
    return any(map(is_collective, nodes_within(gm)))


def _random_operators(graphs: Mapping[str, fx.GraphModule]) -> list[str]:
    """Return the operators that draw random numbers, in the graphs that run."""
    found: set[str] = set()
    for gm in _running(graphs):
        found.update(str(node.target) for node in nodes_within(gm) if is_random(node))
    return sorted(found)


def _run(gm: fx.GraphModule, values: list[Any]) -> Any:
    return NodeByNode(gm, None).run(*values)


def _like(value: Any) -> Any:
    """Return a real tensor like a fake one; its numbers become abstract."""
    if not isinstance(value, Tensor):
        return value
    return torch.ones(tuple(map(int, value.shape)), dtype=value.dtype)
