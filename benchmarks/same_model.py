"""Right models of drawn sizes, and planted mistakes, in ``assert_same_model``.

    python -m benchmarks.same_model --sizes 200 [--first 0]
    python -m benchmarks.same_model --mistakes
    python -m benchmarks.same_model --combinations

``--sizes`` proves models of drawn sizes: uneven shards, one head a rank, a vocabulary that does not
divide. None may raise an alarm. ``--combinations`` prints the table of what is parallel on 8
ranks, with the kind of equal, and CPU seconds. ``--mistakes`` prints a table: each mistake, what a
failure says, and whether ``assert_close`` at its default tolerances sees it in the loss and in the
gradients.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fixtures.combinations import COMBINATIONS, Combination, drawn
from fixtures.models.loss import ce_step
from fixtures.same_model_mistakes import MISTAKES, Mistake
from pytest_gtrainer import AnotherFunction, assert_same_model
from pytest_gtrainer.references.sides import Models, SideResults
from pytest_gtrainer.references.simulated import mesh_of
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.simulated.net import NetModel
from pytest_gtrainer.worlds.simulated.threads.run import run_threads
from pytest_gtrainer.worlds.spec import make_spec


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first size")
    parser.add_argument("--mistakes", nargs="*", metavar="NAME", help="all, or some")
    parser.add_argument("--combinations", nargs="*", metavar="NAME", help="all, or some")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed = report_sizes(range(options.first, options.first + options.sizes))
    if options.combinations is not None:
        failed += report_combinations(options.combinations or COMBINATIONS)
    if options.mistakes is not None:
        failed += report_mistakes(options.mistakes or MISTAKES)
    return 1 if failed else 0


@contextmanager
def mesh_for(combination: Combination) -> Iterator[DeviceMesh]:
    extents = dict(combination.mesh)
    with fake_world(make_spec("fake", size=prod(extents.values()), mesh=extents)) as world:
        yield make_mesh(world)


def report_sizes(seeds: range) -> int:
    """Prove models of drawn sizes; return how many raised something."""
    kinds: Counter[str] = Counter()
    begin = time.process_time()
    for seed in seeds:
        combination = drawn(seed)
        try:
            with mesh_for(combination) as mesh:
                options = combination.options(mesh)
                proof = assert_same_model(
                    combination.parallel,
                    combination.reference,
                    ce_step,
                    combination.batch,
                    **options,
                )
            kinds[proof.kind] += 1
        except Exception as error:
            kinds[type(error).__name__] += 1
            print(f"seed {seed}: {combination}\n{error}", flush=True)
    seconds = time.process_time() - begin
    if seeds:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        print(f"{len(seeds)} sizes in {seconds:.0f} CPU s: {counts}")
    return len(seeds) - kinds["reordered"] - kinds["rounds elsewhere"]


def report_combinations(names: Iterable[str]) -> int:
    """Print the table of combinations; return how many are not equal."""
    failed = 0
    print("| combination | model | kind | compared | CPU seconds |\n|---|---|---|---|---|")
    for name in names:
        combination = COMBINATIONS[name]
        begin = time.process_time()
        try:
            with mesh_for(combination) as mesh:
                options = combination.options(mesh)
                proof = assert_same_model(
                    combination.parallel,
                    combination.reference,
                    ce_step,
                    combination.batch,
                    **options,
                )
            kind, compared = proof.kind, proof.compared
        except Exception as error:
            kind, compared = f"{type(error).__name__}: {error}", 0
            failed += 1
        seconds = time.process_time() - begin
        model = type(combination.config).__name__.removesuffix("Config")
        print(f"| {name} | {model} | {kind} | {compared} | {seconds:.0f} |", flush=True)
    return failed


def report_mistakes(names: Iterable[str]) -> int:
    """Print the table of mistakes; return how many are not told."""
    missed = 0
    print("| mistake | told | loss | gradients |\n|---|---|---|---|")
    for name in names:
        mistake = MISTAKES[name]
        with mesh_for(mistake.right) as mesh:
            told = judge(mistake, mesh)
            loss, gradients = in_floats(mistake, mesh)
        missed += mistake.says not in told or mistake.kind not in told
        lines = [line.strip() for line in told.splitlines()]
        print(f"| {name} | {'; '.join(lines[1:])} | {loss} | {gradients} |", flush=True)
    return missed


def judge(mistake: Mistake, mesh: DeviceMesh) -> str:
    """Return what ``assert_same_model`` says of a mistake."""
    right = mistake.right
    try:
        proof = assert_same_model(
            lambda own: mistake.build(right, own),
            mistake.reference or right.reference,
            mistake.step,
            mistake.batch,
            combine=mistake.combine,
            **right.options(mesh),
        )
    except AnotherFunction as error:
        return str(error)
    return f"both are equal\n{proof}"


def in_floats(mistake: Mistake, mesh: DeviceMesh) -> tuple[str, str]:
    """Return whether ``assert_close`` sees a mistake in the loss, and in the gradients."""
    right = mistake.right
    models = Models(
        lambda own: mistake.build(right, own),
        mistake.reference or right.reference,
        mistake.step,
        mistake.batch,
        right.data_dims,
        mistake.combine,
        right.local,
    )
    extents = dict(right.mesh)
    floats: Any = Floats()
    net = NetModel.of_world(mesh.size())

    def run_rank(rank: int) -> SideResults:
        return models.run_parallel(floats, mesh_of(extents))

    found = run_threads(mesh.size(), run_rank, net=net)
    coordinates = prod(extents[name] for name in right.data_dims)
    wanted = models.run_reference(floats, coordinates, is_scaled=True)
    losses: list[bool] = []
    gradients: list[bool] = []
    for side in found:
        expected = side.part_of(wanted)
        for result, own in side.results().items():
            into = losses if result.startswith("loss") else gradients
            into.append(_is_close(own, expected.get(result, torch.zeros_like(own))))
        for fqn in side.parameters - set(side.gradients):
            gradients.append(f"gradient of {fqn}" not in expected)
    if right.loss_dims:
        return "-", _seen(gradients)
    return _seen(losses), _seen(gradients)


def _is_close(own: Tensor, wanted: Tensor) -> bool:
    try:
        torch.testing.assert_close(own, wanted)
    except AssertionError:
        return False
    return True


def _seen(close: list[bool]) -> str:
    return "passes" if all(close) else "fails"


class Floats:
    """What stands for an arithmetic mode where numbers are what they are."""

    def __init__(self) -> None:
        self.drawn: set[str] = set()
        self.has_communicated = False
        self.decided: frozenset[Tensor] = frozenset()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None

    def make_abstract(self, tensor: Tensor, name: Any) -> None:
        """Leave a tensor as it is."""

    def free(self, tensor: Tensor) -> None:
        """Leave memory as it is."""

    def has(self, tensor: Tensor) -> bool:
        return False

    @property
    def shadows(self) -> Any:
        return self

    arithmetic = shadows

    def read(self, tensor: Tensor) -> None:
        return None

    def lift(self, tensor: Tensor) -> Tensor:
        return tensor

    def compared(self, tensor: Tensor) -> Tensor:
        return tensor

    def compared_instead(self, tensor: Tensor) -> None:
        return None


if __name__ == "__main__":
    sys.exit(main())
