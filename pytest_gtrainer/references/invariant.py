"""Check that the bits of a row depend neither on its batch nor on the parallelism.

A *row* is one index of dimension 0 of the inputs: a request, a sample. A *setting* is one size for
each dimension of ``over``. A row is compared with itself under another setting; rows that are
compared stand in other batches, at other places, or are computed by more ranks.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pytest_gtrainer import facts
from pytest_gtrainer._torch.random_states import random_states_kept
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.facts import counted
from pytest_gtrainer.numerics.bits import (
    byte_view,
    copied,
    count_not_finite,
    is_dtensor,
    same_bytes,
)
from pytest_gtrainer.numerics.calls import Call, kept_calls
from pytest_gtrainer.numerics.compare import BitwiseDifference, compare
from pytest_gtrainer.numerics.record import entries
from pytest_gtrainer.worlds.gathering import gather_objects
from pytest_gtrainer.worlds.simulated import VacuousCheck
from pytest_gtrainer.worlds.simulated.net import NetModel
from pytest_gtrainer.worlds.simulated.threads.run import run_threads

BATCH = "batch"
Results = dict[str, Tensor]


class Setting(NamedTuple):
    """A batch size, whether rows come in another order, and the sizes of the mesh."""

    batch: int
    is_reordered: bool
    mesh: tuple[int, ...]

    def batch_of(self, row: int, rows: int) -> tuple[list[int], int]:
        """Return the first batch that holds a row, and the place of the row in it."""
        for batch in self.batches(rows):
            if row in batch:
                return batch, batch.index(row)
        raise AssertionError("every row is in a batch")

    def batches(self, rows: int) -> list[list[int]]:
        """Return the rows of each batch; the last one is filled up from the beginning."""
        order = list(range(rows))
        if self.is_reordered:
            # Turned by one, too: in batches of two, say, a mere reverse order keeps all pairs.
            order = [*order[-2::-1], order[-1]]
        order += order[: -rows % self.batch]
        return [order[first : first + self.batch] for first in range(0, len(order), self.batch)]


@dataclass(frozen=True, slots=True)
class Invariance:
    """The result of ``assert_invariant``.

    Attributes:
        settings: the settings under which all rows had the same bits.
        rows: how many rows were compared.
        not_finite: results with NaN or infinite elements, which are equal whatever computes them.
    """

    settings: tuple[str, ...]
    rows: int
    not_finite: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{counted(self.rows, 'row')} equal under: {'; '.join(self.settings)}"]
        for name in self.not_finite:
            lines.append(f"not finite: {name}")
        return "\n".join(lines)


@facts.check
def assert_invariant(
    fn: Callable[..., Any],
    rows: Any,
    over: Mapping[str, Sequence[int]],
    *,
    what: str = "",
) -> Invariance:
    """Check that a row has the same bits in every batch, and on any number of ranks.

    Every combination of the sizes in ``over`` is run. In each, all rows go through ``fn`` in
    batches of that size, as they come and in another order, so each row has other company and
    another place. The last batch is filled up with the first rows. Results are compared with those
    of the first sizes. That run is repeated first: a function that does not repeat itself is
    refused. So is what could not fail: batches of rows that are all equal, results that are equal
    for all rows or not finite, a mesh, or one of its dimensions, along which no tensor is sent.

    Args:
        fn: takes a batch, in the structure of ``rows``, and returns tensors with as many rows: a
            tensor, or a mapping or list of some. If ``over`` has other dimensions than "batch", it
            takes a ``DeviceMesh`` with these dimensions as second argument, and returns whole rows
            on every rank; a DTensor is gathered. Every call starts from the same random states.
        rows: a tensor, or a structure of tensors with as many rows each in dimension 0. What is no
            tensor is given to ``fn`` as it is.
        over: sizes by dimension. "batch" is the number of rows of a batch; without it all rows are
            one batch. Every other name is a dimension of a mesh, and its sizes are numbers of
            ranks: on simulated ranks of one node, or in a test on ranks on these, whose number each
            mesh must divide; then every rank calls this.
        what: what is run, for the message.

    Returns:
        The settings that were compared.

    Raises:
        BitwiseDifference: on every rank, with the setting, the row, and the first operator or
            collective whose order depends on it.
        VacuousCheck: the check could not have failed.
        ValueError: sizes or rows that cannot be compared.
    """
    __tracebackhide__ = True
    runs = _Runs(fn, rows, over)
    first, *others = runs.settings()
    results = runs.results([first, first, *others])
    reference = results.pop(0)[0][0]
    _refuse_what_cannot_fail(runs, reference)

    for setting, of_ranks in zip([first, *others], results, strict=True):
        for rank, again, result in _each_result(of_ranks):
            verdict = compare(result, reference)
            if verdict.outcome == "equal":
                continue
            facts.emit("verdict", outcome=verdict.label, tensors=verdict.compared, what=what)
            lines = [f"{what or 'a row'} depends on {runs.spell(setting, first, rank)}"]
            if again:
                lines = [
                    f"{what or 'a row'} that fills up the last batch depends on "
                    f"{runs.spell(setting, first, rank)}"
                ]
            elif setting == first and rank == 0:
                lines = [
                    f"{what or 'the function'} does not repeat itself, with the same batch: "
                    "assert_run_to_run finds out on what it depends"
                ]
            elif verdict.differences and verdict.differences[0].element:
                row = verdict.differences[0].element[0]
                lines += runs.culprit(setting, first, rank, row)
            raise BitwiseDifference("\n".join([*lines, str(verdict)]), verdict)

    verdict = compare(results[-1][-1][0], reference)
    facts.emit("verdict", outcome=verdict.label, tensors=verdict.compared, what=what)
    spelled = [runs.spell(setting) for setting in (first, *others)]
    return Invariance(tuple(spelled), runs.count, verdict.not_finite)


def _each_result(
    of_ranks: Sequence[Sequence[Results]],
) -> Iterable[tuple[int, bool, Results]]:
    """Yield rank, whether rows have their second place, and results."""
    for rank, places in enumerate(of_ranks):
        for place, result in enumerate(places):
            yield rank, place > 0, result


class _Runs:
    """The function, its rows, and how they are run."""

    def __init__(
        self, fn: Callable[..., Any], rows: Any, over: Mapping[str, Sequence[int]]
    ) -> None:
        self.fn, self.rows = fn, rows
        facts.check_callable(fn=fn)
        facts.check_type(over, Mapping, "over", 'sizes by name, {"batch": [1, 7]}')
        for name, given in over.items():
            facts.check_type(given, (list, tuple, range), f"over[{name!r}]", "a list of sizes")
        self.count = _count_rows(rows)
        sizes = {name: list(dict.fromkeys(given)) for name, given in over.items()}
        for name, given in sizes.items():
            if not given or any(type(size) is not int or size < 1 for size in given):
                raise ValueError(f"over[{name!r}] is {over[name]}: give sizes, at least 1")
        if all(len(given) == 1 for given in sizes.values()):
            raise VacuousCheck(
                f"over={dict(over)} has one setting, which nothing can be compared with: "
                'give two sizes of a dimension, as {"batch": [1, 7]}'
            )
        self.batches = sizes.pop(BATCH, [self.count])
        if max(self.batches) > self.count:
            raise ValueError(
                f"a batch of {max(self.batches)} rows, of {self.count}: give as many rows as the "
                "largest batch has, or more"
            )
        self.is_by_batch = BATCH in over
        self.names, self.meshes = tuple(sizes), list(product(*sizes.values()))
        self._varied = [name for name, given in sizes.items() if len(given) > 1]
        self.is_on_ranks = dist.is_initialized() and dist.get_backend() != "fake"
        if self.names and self.is_on_ranks:
            for mesh in self.meshes:
                if dist.get_world_size() % math.prod(mesh):
                    raise ValueError(
                        f"a mesh of {math.prod(mesh)} ranks does not divide the world of "
                        f"{dist.get_world_size()}: change one of them"
                    )

    def settings(self) -> list[Setting]:
        """Return the settings; what has changed in fewer dimensions than another comes first."""
        found = []
        for mesh, batch, is_reordered in product(self.meshes, self.batches, (False, True)):
            # A batch of one has no order; rows that are one batch are the same question only if
            # batches are asked about.
            if not is_reordered or (self.is_by_batch and batch > 1):
                found.append(Setting(batch, is_reordered, mesh))
        base = found[0]
        found.sort(
            key=lambda one: sum(x != y for x, y in zip(_flat(one), _flat(base), strict=True))
        )
        return found

    def spell(self, setting: Setting, first: Setting | None = None, rank: int = 0) -> str:
        """Spell a setting, or the dimensions in which it differs from the first one."""
        words = []
        if self.is_by_batch and (first is None or setting[:2] != first[:2]):
            order = ", reordered" if setting.is_reordered else ""
            words.append(f"batch={setting.batch}{order}")
        for place, name in enumerate(self.names):
            if first is None or setting.mesh[place] != first.mesh[place]:
                words.append(f"{name}={setting.mesh[place]}")
        if first is not None:
            if not words:
                words.append(f"the rank: on rank {rank}")
            elif self.names:
                words.append(f"on rank {rank}")
            return f"{', '.join(words)}; compared with {self.spell(first)}"
        return ", ".join(words)

    def results(self, settings: Sequence[Setting]) -> list[list[list[Results]]]:
        """Return the results of all rows, by setting and rank; see ``_all_rows``."""
        by_mesh: dict[tuple[int, ...], list[list[list[Results]]]] = {}
        for mesh in self.meshes:
            of_mesh = [setting for setting in settings if setting.mesh == mesh]
            by_mesh[mesh] = self._on_mesh(
                mesh, lambda place, own=of_mesh: [self._all_rows(each, place) for each in own]
            )
        found = []
        for setting in settings:
            found.append([of_rank.pop(0) for of_rank in by_mesh[setting.mesh]])
        return found

    def _on_mesh(self, sizes: tuple[int, ...], run: Callable[..., Any]) -> list[Any]:
        """Call ``run(mesh)`` on every rank of a mesh, and return the results by rank."""
        if not self.names:
            return [run(None)]

        def on_rank(rank: int) -> tuple[Any, bool | set[int]]:
            mesh = self._mesh(sizes)
            result = run(mesh)
            if not self.is_on_ranks:
                world: Any = dist.group.WORLD  # a ThreadGroup
                return result, world.partners
            # In a run of its own: under a mode, compiled code would be another program.
            with kept_calls(outputs=False) as calls:
                self._call(list(range(self.batches[0])), mesh)
            return result, calls.has_communicated

        size = math.prod(sizes)
        if self.is_on_ranks:
            of_ranks = gather_objects(on_rank(dist.get_rank()))
        else:
            of_ranks = run_threads(size, on_rank, net=NetModel.of_world(size))
        asked = [name for name in self._varied if sizes[self.names.index(name)] > 1]
        is_asked = bool(asked) or (size > 1 and not self._varied)
        if is_asked and not any(partners for _, partners in of_ranks):
            raise VacuousCheck(
                f"on a mesh of {size} ranks no rank came to a collective: the function does not "
                "use the mesh that it is given"
            )
        if not self.is_on_ranks:
            for name in asked:
                self._refuse_unused(name, sizes, [partners for _, partners in of_ranks])
        return [result for result, _ in of_ranks]

    def _refuse_unused(
        self, name: str, sizes: tuple[int, ...], partners: Sequence[set[int]]
    ) -> None:
        """Refuse a dimension along which no rank exchanges a tensor."""
        place = self.names.index(name)
        # Ranks lie in the mesh by rows.
        behind = math.prod(sizes[place + 1 :])
        for rank, others in enumerate(partners):
            own = rank // behind % sizes[place]
            if any(other // behind % sizes[place] != own for other in others):
                return
        raise VacuousCheck(
            f"no rank came to a collective along {name!r}, of {sizes[place]} ranks: the function "
            "does not use this dimension of the mesh"
        )

    def _mesh(self, sizes: tuple[int, ...]) -> DeviceMesh:
        device = "cpu"
        if dist.get_backend() == "nccl":
            device = "cuda"
        if not self.is_on_ranks:
            return init_device_mesh(device, sizes, mesh_dim_names=self.names)
        # Ranks beyond one mesh do the same in meshes beside it.
        replicas = dist.get_world_size() // math.prod(sizes)
        names = ("replica", *self.names)
        return init_device_mesh(device, (replicas, *sizes), mesh_dim_names=names)[self.names]

    def _all_rows(self, setting: Setting, mesh: DeviceMesh | None) -> list[Results]:
        """Return the results of all rows, and again with the second place of those that fill up."""
        first: dict[str, dict[int, Tensor]] = {}
        last: dict[str, dict[int, Tensor]] = {}
        for batch in setting.batches(self.count):
            for name, tensor in self._call(batch, mesh).items():
                for place, row in enumerate(batch):
                    first.setdefault(name, {}).setdefault(row, tensor[place])
                    last.setdefault(name, {})[row] = tensor[place]
        is_filled = self.count % setting.batch != 0
        results = []
        for found in (first, last) if is_filled else (first,):
            stacked = {}
            for name, of_row in found.items():
                if len(of_row) != self.count:
                    raise ValueError(f"{name or 'the result'} is not returned for every batch")
                # Contiguous and on the host, so that ranks can exchange and compare results.
                stacked[name] = torch.stack([of_row[row] for row in range(self.count)]).cpu()
            results.append(stacked)
        return results

    def _call(self, batch: list[int], mesh: DeviceMesh | None) -> Results:
        """Call the function with a batch, from the random states of now, and check its results."""
        own = pytree.tree_map(
            lambda leaf: leaf[batch] if isinstance(leaf, Tensor) else leaf, self.rows
        )
        with random_states_kept():
            result = self.fn(own) if mesh is None else self.fn(own, mesh)
            whole = pytree.tree_map(_gathered, result)
        found = {}
        for key, tensor in entries(whole).items():
            if not tensor.dim() or len(tensor) != len(batch):
                raise ValueError(
                    f"{key.name or 'the result'} has shape {list(tensor.shape)} for a batch of "
                    f"{counted(len(batch), 'row')}: return tensors with a row for each row"
                )
            found[key.name] = copied(tensor)
        if not found:
            raise VacuousCheck("the function returns no tensor: return the rows that it computes")
        return found

    def culprit(self, setting: Setting, first: Setting, rank: int, row: int) -> list[str]:
        """Return lines that name the first operator or collective that differs for a row."""
        # Next to the setting: if only the batch is another one, operators are the same.
        near = Setting(first.batch, first.is_reordered, setting.mesh)
        if setting[:2] == first[:2]:
            near = first
        sides = self._calls(near, row, rank), self._calls(setting, row, rank)
        if near is first and self.names:
            return [_first_of_parallel(*sides)]
        other = next((size for size in self.batches if size != near.batch), None)
        if other is None:
            return ["give another batch size, too, and the first operator is named"]
        shapes = self._calls(Setting(other, False, setting.mesh), row, rank)
        places = near.batch_of(row, self.count)[1], setting.batch_of(row, self.count)[1]
        return [_first_of_batches(*sides, shapes, (near.batch, setting.batch), places)]

    def _calls(self, setting: Setting, row: int, rank: int) -> list[Call]:
        """Return the calls of the batch that holds a row, on this rank of the mesh or the first."""
        batch, _ = setting.batch_of(row, self.count)

        def run(mesh: DeviceMesh | None) -> list[Call]:
            with kept_calls() as calls:
                self._call(batch, mesh)
            return calls.calls

        of_ranks = self._on_mesh(setting.mesh, run)
        return of_ranks[rank if rank < len(of_ranks) else 0]


def _flat(setting: Setting) -> tuple[Any, ...]:
    return (*setting[:2], *setting.mesh)


def _gathered(value: Any) -> Any:
    if isinstance(value, Tensor) and is_dtensor(value):
        return value.full_tensor()
    return value


def _count_rows(rows: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(rows) if isinstance(leaf, Tensor)]
    counts = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "rows is a tensor, or a structure of tensors with as many rows each in dimension 0; "
            f"here are {counted(len(tensors), 'tensor')} of {sorted(counts)} rows"
        )
    return counts.pop()


def _has_other_rows(tensors: Iterable[Tensor]) -> bool:
    """Return whether a row differs from the first one."""
    for tensor in tensors:
        first = byte_view(tensor[:1])
        if not all(same_bytes(byte_view(row), first) for row in tensor.split(1)):
            return True
    return False


def _refuse_what_cannot_fail(runs: _Runs, reference: Results) -> None:
    for name, tensor in reference.items():
        if not tensor.numel() or count_not_finite(tensor) == tensor.numel():
            raise VacuousCheck(
                f"{name or 'the result'} has no finite element, so its bits are equal whatever "
                "computes them: take rows whose results are finite"
            )
    tensors = [leaf for leaf in pytree.tree_leaves(runs.rows) if isinstance(leaf, Tensor)]
    if not _has_other_rows(tensors):
        if not runs.is_by_batch:
            return  # other sums of ranks show in equal rows, too
        raise VacuousCheck("all rows are equal, so a row has no other company: take other rows")
    if not _has_other_rows(reference.values()):
        raise VacuousCheck(
            "the results of all rows are equal, so nothing of a row is in its result: this check "
            "cannot fail"
        )


def _first_of_batches(
    near: Sequence[Call],
    other: Sequence[Call],
    shapes: Sequence[Call],
    sizes: tuple[int, int],
    places: tuple[int, int],
) -> str:
    """Name the first call whose part of one row differs between two batches.

    ``shapes`` are the calls with a batch of another size than ``near``: the dimension of a tensor
    that differs there holds the rows.
    """
    for number, (a, b) in enumerate(zip(near, other, strict=False)):
        if (a.what, a.line) != (b.what, b.line):
            return f"other operators are called: {b}, and {a} in a batch of {sizes[0]}"
        for place, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=False)):
            dim = None
            if number < len(shapes) and place < len(shapes[number].outputs):
                dim = _dimension_of_rows(x, shapes[number].outputs[place])
            if dim is not None:
                x, y = _row_of(x, dim, sizes[0], places[0]), _row_of(y, dim, sizes[1], places[1])
            if x is not None and y is not None and not _same(x, y):
                return f"first {_kind(b)} that depends on it: {b}"
    if len(near) != len(other):
        return f"{len(other)} operators are called, and {len(near)} in a batch of {sizes[0]}"
    return "no operator was seen whose part of the row differs"


def _dimension_of_rows(tensor: Tensor, with_other_size: Tensor) -> int | None:
    """Return the first dimension in which two shapes differ; None if the batch is in none."""
    sizes = zip(tensor.shape, with_other_size.shape, strict=False)
    return next((dim for dim, (a, b) in enumerate(sizes) if a != b), None)


def _row_of(tensor: Tensor, dim: int, rows: int, place: int) -> Tensor | None:
    """Return what a tensor holds of one row; rows are outermost in the dimension."""
    if tensor.dim() <= dim or tensor.shape[dim] % rows or not tensor.numel():
        return None
    return tensor.unflatten(dim, (rows, -1)).select(dim, place)


def _first_of_parallel(few: Sequence[Call], many: Sequence[Call]) -> str:
    """Name the first call that differs between two meshes, and the collective behind it.

    A rank of the larger mesh may compute a part of a sum, which a collective then completes. So
    where the result of a collective is equal on both meshes, what differed before it does not
    count.
    """
    by_place = _by_place(few)
    suspect = None
    for place, call in _by_place(many).items():
        if place not in by_place:
            continue
        pairs = zip(by_place[place].outputs, call.outputs, strict=False)
        if not all(_same_or_part(x, y) for x, y in pairs):
            suspect = suspect or call
            if call.is_collective:
                break
        elif call.is_collective:
            suspect = None
    if suspect is None:
        return "no operator was seen that differs"
    text = f"first {_kind(suspect)} that depends on it: {suspect}"
    behind = [call for call in many[many.index(suspect) + 1 :] if call.is_collective]
    if behind and not suspect.is_collective:
        text += f"\n  the collective after it: {behind[0]}"
    return text


def _by_place(calls: Sequence[Call]) -> dict[tuple[str, str, int], Call]:
    """Return calls by operator, line, and how often that was called before."""
    found: dict[tuple[str, str, int], Call] = {}
    counts: dict[tuple[str, str], int] = {}
    for call in calls:
        # The words of a collective go on with shapes, which depend on the mesh.
        place = call.what.partition(" ")[0], call.line
        counts[place] = counts.get(place, 0) + 1
        found[(*place, counts[place])] = call
    return found


def _same_or_part(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are equal, or one is a chunk of the other, or not comparable."""
    if x.numel() < y.numel():
        x, y = y, x
    differing = _dimension_of_rows(x, y)
    if x.dim() != y.dim() or differing is None or not y.numel():
        return x.shape != y.shape or _same(x, y)
    chunks = x.split(y.shape[differing], differing)
    return any(chunk.shape != y.shape or _same(chunk, y) for chunk in chunks)


def _same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and same_bytes(byte_view(x), byte_view(y))


def _kind(call: Call) -> str:
    return "collective" if call.is_collective else "operator"
