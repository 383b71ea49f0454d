"""Refuse arguments of ``assert_same_model`` with which equal results would prove nothing.

Most are mistakes that would be green: a batch that all ranks share, or a pattern that names
nothing. The others would fail somewhere inside of torch, with a message about something else.
"""

import difflib
import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pytest_gtrainer import facts
from pytest_gtrainer._torch.values import pytree
from pytest_gtrainer.facts import check_callable, check_type
from pytest_gtrainer.references.sides import Combine, Models, SideResults, data_coordinate

__tracebackhide__ = facts.hides_frames

_DEFAULT_DATA_DIMS = ("dp",)


def check_arguments(models: Models, mesh: DeviceMesh | None, loss_dims: Sequence[str]) -> None:
    """Refuse what the arguments cannot mean.

    Raises:
        TypeError: an argument of another type than is asked for.
        ValueError: dimensions or parameters that are not there; equal batches.
    """
    check_type(mesh, (DeviceMesh, type(None)), "mesh", "the mesh of the ranks, gt_mesh, or none")
    _check_functions(models, mesh)
    _check_dims(mesh, models.data_dims, "data_dims")
    _check_dims(mesh, loss_dims, "loss_dims")
    both = sorted({*models.data_dims} & {*loss_dims})
    if both:
        raise ValueError(
            f"data_dims and loss_dims both have {', '.join(map(repr, both))}: along a dimension "
            "ranks have other batches, and each its own loss, or they compute parts of one loss"
        )
    _check_combine(models.combine, loss_dims)
    _check_local(models, mesh)
    _check_ignored(models)
    _check_batches(models, data_coordinate(mesh, models.data_dims)[1])


def _check_functions(models: Models, mesh: DeviceMesh | None) -> None:
    for name in ("parallel", "reference"):
        function = getattr(models, name)
        if isinstance(function, nn.Module):
            raise TypeError(
                f"{name} is a module, {type(function).__name__}: give a function that builds it, "
                "as each run needs a new one"
            )
        check_callable(**{name: function})
    check_callable(step=models.step, batch=models.batch)
    takes_mesh = mesh is not None and models.takes_mesh
    if mesh is None and models.takes_mesh:
        _check_call("mesh is None, so parallel", models.parallel)
    _check_call("parallel", models.parallel, *([mesh] if takes_mesh else []))
    _check_call("reference", models.reference)
    _check_call("batch", models.batch, 0)


def _check_call(name: str, function: Any, *given: object) -> None:
    """Refuse a function that cannot be called with what it is given."""
    try:
        inspect.signature(function).bind(*given)
    except ValueError:
        return  # of C code
    except TypeError as error:
        values = "with the mesh" if name == "parallel" else "with a data coordinate"
        if not given:
            values = "without arguments"
        raise TypeError(f"{name} is called {values}: {error}") from None


def _check_dims(mesh: DeviceMesh | None, dims: Any, argument: str) -> None:
    """Refuse dimensions that the mesh does not have: all ranks would get one batch."""
    names = "a tuple of names of the mesh's dimensions, one as ('dp',)"
    check_type(dims, (tuple, list), argument, names)
    for name in dims:
        check_type(name, str, f"one of {argument}", "the name of a dimension of the mesh")
    for name in dims:
        if list(dims).count(name) > 1:
            raise ValueError(f"{argument}={tuple(dims)} has {name!r} twice: name it once")
    if mesh is None:
        if dims and tuple(dims) != _DEFAULT_DATA_DIMS:
            raise ValueError(f"{argument}={tuple(dims)}, and there is no mesh: give mesh=gt_mesh")
        return
    names_of_mesh = mesh.mesh_dim_names
    if names_of_mesh is None:
        raise ValueError("the mesh has no names: give its dimensions names, mesh_dim_names=")
    if any(name not in names_of_mesh for name in dims):
        means = "have other batches" if argument == "data_dims" else "compute parts of one loss"
        raise ValueError(
            f"{argument}={tuple(dims)}: the mesh has {', '.join(map(repr, names_of_mesh))}. Name "
            f"those along which ranks {means}, or () if there are none"
        )


def _check_combine(combine: Combine, loss_dims: Sequence[str]) -> None:
    if not callable(combine) and combine not in ("mean", "sum"):
        raise ValueError(f'combine={combine!r}: take "mean", "sum", or a function of the losses')
    if callable(combine) and loss_dims:
        raise ValueError(
            'combine is a function, and nobody knows how parts along loss_dims add up: take "mean" '
            'or "sum", or let the step return the whole loss'
        )


def _check_local(models: Models, mesh: DeviceMesh | None) -> None:
    """Refuse patterns that match no tensor, and dimensions that do not exist."""
    check_type(models.local, Mapping, "local", "a dict, as {'experts.*': ('ep', 0)}")
    if not models.local:
        return
    names = () if mesh is None else mesh.mesh_dim_names or ()
    reference = models.build_reference()
    tensors = dict([*reference.named_parameters(), *reference.named_buffers()])
    for pattern, place in models.local.items():
        check_type(pattern, str, "a pattern in local", "the name of a parameter, as 'experts.*'")
        said = f"local={{{pattern!r}: {place!r}}}"
        is_pair = isinstance(place, tuple | list) and len(place) == 2
        if not is_pair or not isinstance(place[0], str) or type(place[1]) is not int:
            raise TypeError(
                f"{said}: give a tuple of the dimension of the mesh and that of the tensor, "
                "as ('ep', 0)"
            )
        mesh_dim, dim = place
        matched = fnmatch.filter(tensors, pattern)
        if not matched:
            close = difflib.get_close_matches(pattern, tensors, n=1, cutoff=0.4)
            suggestion = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{said}: the reference has no parameter of that name{suggestion}")
        if mesh_dim not in names:
            raise ValueError(f"{said}: the mesh has {', '.join(map(repr, names)) or 'no ranks'}")
        for fqn in matched:
            if not 0 <= dim < tensors[fqn].ndim:
                shape = list(tensors[fqn].shape)
                raise ValueError(f"{said}: {fqn} has shape {shape}, and no dimension {dim}")


def _check_ignored(models: Models) -> None:
    give = "a tuple of names of buffers, one as ('*.running_mean',)"
    check_type(models.ignore_buffers, (tuple, list), "ignore_buffers", give)
    if not models.ignore_buffers:
        return
    buffers = [name for name, _ in models.build_reference().named_buffers()]
    for pattern in models.ignore_buffers:
        check_type(pattern, str, "one of ignore_buffers", "the name of a buffer")
        if not fnmatch.filter(buffers, pattern):
            close = difflib.get_close_matches(pattern, buffers, n=1, cutoff=0.4)
            suggestion = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"ignore_buffers={(pattern,)}: the reference has no buffer of that name{suggestion}"
            )


def check_local_is_used(
    models: Models, mesh: DeviceMesh | None, found: Sequence[SideResults]
) -> None:
    """Refuse patterns by which no rank has a part of a tensor, such as one of a DTensor."""
    used = set().union(*(side.used_local for side in found))
    for pattern, (mesh_dim, dim) in models.local.items():
        # On a single rank a part is the whole tensor.
        if pattern in used or mesh is None or mesh[mesh_dim].size() == 1:
            continue
        raise ValueError(
            f"local={{{pattern!r}: {(mesh_dim, dim)}}} is used by no rank: what it names is a "
            "DTensor, which says itself where it belongs, is whole on each rank, or another "
            "pattern names it. Leave it out"
        )


def _check_batches(models: Models, coordinates: int) -> None:
    """Refuse batches of whole numbers that are equal: then no reduction over data would show."""
    batches = [pytree.tree_leaves(models.batch_of(each)) for each in range(coordinates)]
    for later in range(1, coordinates):
        for earlier in range(later):
            if _are_equal(batches[earlier], batches[later]):
                raise ValueError(
                    f"batch({earlier}) and batch({later}) are equal whole numbers, so a gradient "
                    "that nobody reduces would not show: give each data coordinate its own"
                )


def _are_equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    if len(first) != len(second):
        return False
    for own, other in zip(first, second, strict=True):
        if not isinstance(own, Tensor) or not isinstance(other, Tensor):
            if own is not other and own != other:
                return False
        elif own.is_floating_point() or not torch.equal(own, other):
            return False  # floating-point numbers are abstract, and so never equal
    return True
