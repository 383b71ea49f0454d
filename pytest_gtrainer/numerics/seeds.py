"""Seeds and random states of Python, NumPy and torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_gtrainer._torch.process import waiting_seeds

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def seed_everything(seed: int, *, later: bool = True) -> None:
    """Seed Python, torch and NumPy.

    Args:
        later: also what has not started: a device gets the seed when it starts, and NumPy is imported for it. Without
            it neither happens, which costs a tenth.
    """
    random.seed(seed)
    if later:
        torch.manual_seed(seed % 2**64)
    else:
        torch.default_generator.manual_seed(seed % 2**64)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed % 2**64)
    numpy = _numpy() if later else sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def distinct_seed(seed: int, places: Sequence[tuple[int, int]]) -> int:
    """A seed per coordinate on the mesh dimensions that ask for distinct ones.

    Args:
        seed: the base seed, which all other dimensions share.
        places: ``(coordinate, size)`` of this rank on each dimension that asks.

    >>> [distinct_seed(40, [(pp, 2), (ep, 3)]) for pp in range(2) for ep in range(3)]
    [40, 41, 42, 43, 44, 45]
    """
    offset = 0
    for coordinate, size in places:
        if not 0 <= coordinate < size:
            raise ValueError(f"coordinate {coordinate} is not on a mesh dimension of size {size}")
        offset = offset * size + coordinate
    return (seed + offset) % 2**64


def mesh_seed(seed: int, mesh: DeviceMesh, distinct: Sequence[str] = ()) -> int:
    """This rank's seed: the base seed, plus an offset along the mesh dimensions named in ``distinct`` (K4).

    Raises:
        ValueError: the mesh has no dimension of that name, or this rank is not on it.
    """
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in distinct if name not in names]
    if unknown:
        raise ValueError(f"the mesh has no dimension {', '.join(map(repr, unknown))}; its dimensions are {names}")
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise ValueError(f"this rank is not on {mesh}")
    return distinct_seed(seed, [(coordinates[names.index(name)], mesh.size(names.index(name))) for name in distinct])


def random_state() -> dict[str, torch.Tensor]:
    """Every generator's state as a tensor, by name: ``python``, ``numpy``, ``torch.cpu``, ``torch.cuda.0``, ...

    Nothing is initialised for it: of CUDA only if it runs, of NumPy only if it is loaded.
    """
    version, words, gauss = random.getstate()
    states = {"python": torch.tensor([version, *words], dtype=torch.int64)}
    if gauss is not None:
        states["python.gauss"] = torch.tensor(gauss, dtype=torch.float64)
    numpy = sys.modules.get("numpy") if "numpy.random" in sys.modules else None
    if numpy is not None:
        _, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        states["numpy.gauss"] = torch.tensor(cached, dtype=torch.float64)
    states["torch.cpu"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"torch.cuda.{index}"] = state
    return states


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put every generator back; one that only came to life inside the block stays as it is."""
    put_back = random_states_now()
    try:
        yield
    finally:
        put_back()


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """Where every generator of this process was; can be pickled, and put back in another process.

    Attributes:
        cuda: one state a GPU; None where CUDA had not started.
        waiting: seeds that wait for CUDA to start, which are process state too.
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    cuda: list[torch.Tensor] | None
    waiting: dict[str, Any]

    @classmethod
    def now(cls) -> GeneratorStates:
        """Those of this moment; nothing is drawn, and CUDA is not started."""
        numpy = _numpy()
        return cls(
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
            waiting=dict(waiting_seeds()),
        )

    def put_back(self) -> None:
        """Set every generator; one that came to life later is left as it is."""
        random.setstate(self.python)
        torch.set_rng_state(self.cpu)
        numpy = _numpy()
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        waiting_seeds().update(self.waiting)


def random_states_now() -> Callable[[], None]:
    """What puts every generator to where it is now; one that comes to life later it leaves as it is."""
    return GeneratorStates.now().put_back


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


