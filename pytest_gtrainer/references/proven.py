"""Training, by the graph and eagerly, as programs proven on all ranks of a simulated world.

Parameters are abstract by their FQN and place in the whole model, and floating-point inputs by step
and data coordinate. So whatever shards, gathers, reduces, clips and steps is part of the proof.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.mode import ArithmeticMode
from pytest_gtrainer.numerics.record import Record
from pytest_gtrainer.proofs.anyorder import AnyOrder
from pytest_gtrainer.proofs.programs import Observed, Program, make_abstract
from pytest_gtrainer.proofs.proof import Proof
from pytest_gtrainer.proofs.prove import prove_programs
from pytest_gtrainer.references.config import Batch, TrainConfig
from pytest_gtrainer.references.simulated import (
    ConfigOfMesh,
    SimulatedGraphRun,
    config_of_mesh,
    simulated_eager,
)
from pytest_gtrainer.tracing.model import local
from pytest_gtrainer.worlds.fake import net_of
from pytest_gtrainer.worlds.simulated.net import Net
from pytest_gtrainer.worlds.spec import World


def prove_training(
    subject: SimulatedGraphRun, config: TrainConfig | ConfigOfMesh, world: World
) -> Proof:
    """Return which kind of equal training by the graph is to eager training, for any numbers."""
    graph = _GraphTraining(subject, net_of(world))
    eager = _EagerTraining(config, world)
    return prove_programs((graph, eager))


class ResultRecorder(Record):
    """Takes copies of what a run records, as its results; its length counts them."""

    def __init__(self, world_size: int, observed: Observed) -> None:
        super().__init__(world_size)
        self._observed, self._count = observed, 0

    def __len__(self) -> int:
        return self._count

    def add(self, step: int, rank: int, phase: str, name: str, tensor: Tensor) -> None:
        result = f"{phase} of {name}" if phase != name else name
        self._observed.outputs[f"{result}, step {step}", rank] = local(tensor).detach().clone()
        self._count += 1


def _abstract(config: TrainConfig, mode: ArithmeticMode) -> TrainConfig:
    """Return a configuration whose models and inputs are abstract."""

    def model() -> nn.Module:
        built = config.model()
        for name, parameter in built.named_parameters():
            make_abstract(mode, local(parameter), (name, *shard_of(parameter)))
        return built

    def batch(step: int, coordinate: int) -> Batch:
        leaves, spec = pytree.tree_flatten(config.batch(step, coordinate))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                # A copy, as a batch may be given again in another step.
                leaves[place] = leaf.clone()
                make_abstract(mode, leaves[place], ("input", step, coordinate, place))
        return pytree.tree_unflatten(leaves, spec)

    return replace(config, model=model, batch=batch)


def shard_of(parameter: Tensor) -> list[int]:
    """Return which shard of a parameter this rank has: ranks with other shards have other numbers.

    What is no DTensor counts as the same on all ranks.
    """
    if not isinstance(parameter, DTensor):
        return []
    places = parameter.device_mesh.get_coordinate() or []
    found = []
    for place, placement in zip(places, parameter.placements, strict=True):
        if not placement.is_replicate():
            found.append(place)
    return found


def net_for(mode: ArithmeticMode, net: Net) -> Net:
    """Return the net in which ranks add in an arithmetic: a field knows no order."""
    return AnyOrder.of(net) if isinstance(mode.arithmetic, Field) else net


class _GraphTraining(Program):
    def __init__(self, subject: SimulatedGraphRun, net: Net) -> None:
        self._subject, self._net = subject, net

    def _run(self, mode: ArithmeticMode, observed: Observed) -> None:
        subject = self._subject.started_under(
            mode.on_another_thread, net_for(mode, self._net), lambda own: _abstract(own, mode)
        )
        with mode:
            subject.run(ResultRecorder(self._net.size, observed))


class _EagerTraining(Program):
    def __init__(self, config: TrainConfig | ConfigOfMesh, world: World) -> None:
        self._net = net_of(world)
        self._build, self._extents = config_of_mesh(config, world.size, world.mesh)

    def _run(self, mode: ArithmeticMode, observed: Observed) -> None:
        simulated_eager(
            lambda mesh: _abstract(self._build(mesh), mode),
            net_for(mode, self._net),
            mesh=self._extents,
            recorders=[ResultRecorder(self._net.size, observed) for _ in range(self._net.size)],
            under=mode.on_another_thread,
        )
