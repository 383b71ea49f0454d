"""Graphs as bytes, for other processes that run the same program.

- ``torch.fx._graph_pickler.GraphPickler`` pickles what graphs hold: operators, symbolic numbers and
  what is known about them. Its ``_unpickle_state`` stands for the reader's ``_UnpickleState``, in
  whose ``fake_mode`` the symbols live.
- It describes a fake tensor by a hundred attributes, and looks through all arguments of a node.
  Here a tensor is a view of numbered memory, and a node its number, which takes a third of the
  time.
- ``Tensor._make_subclass`` makes a fake tensor of a meta tensor that shows a given storage, as
  ``FakeTensor.__new__`` does in five times the time.
- ``as_strided`` of a tensor without elements and ``resize_storage_bytes_`` ask nothing of symbolic
  sizes. ``set_`` and ``empty`` would decide there whether the result is contiguous, which an
  unbacked symbol cannot answer.
"""

import io
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from pytest_gtrainer._torch import private_names
from pytest_gtrainer._torch.graph_modules import lazy_module
from pytest_gtrainer._torch.values import FakeTensor, FakeTensorMode, storage_id

with private_names():
    from torch.fx._graph_pickler import GraphPickler, Options, _GraphUnpickler, _UnpickleState

ATTRIBUTES = {
    "torch.fx._graph_pickler:GraphPickler": ("_unpickle_state",),
    "torch:Tensor": ("_make_subclass",),
    "torch._C": ("_set_throw_on_mutable_data_ptr",),
}


def _new_storage(nbytes: Any) -> torch.UntypedStorage:
    """Return a new meta storage of ``nbytes`` bytes, a number or a symbol."""
    if isinstance(nbytes, int):
        return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
    shown = torch.empty(0, dtype=torch.uint8, device="meta")
    torch.ops.inductor.resize_storage_bytes_(shown, nbytes)
    return shown.untyped_storage()


def _fake_on_storage(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    view: tuple[Any, Any, Any],
    attributes: dict[torch.device, dict[str, Any]],
) -> FakeTensor:
    """Return a fake tensor that shows ``view`` (size, stride, offset) of ``storage``, without
    dispatch.

    ``attributes`` caches what a fake tensor of each device holds beside its sizes. All tensors of a
    mode share it.
    """
    shown = (
        torch.empty(0, dtype=dtype, device="meta").set_(storage, 0, (0,), (1,)).as_strided(*view)
    )
    if device not in attributes:
        attributes[device] = dict(vars(FakeTensor(mode, shown, device)))
    made = torch.Tensor._make_subclass(
        FakeTensor, shown, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(attributes[device])
    return made


class _Writer(GraphPickler):
    def __init__(self, stream: io.BytesIO, device: torch.device) -> None:
        super().__init__(stream, Options(ops_filter=None))
        self.numbers, self._device = dict[fx.Node, int](), device

    def persistent_id(self, obj: object) -> Any:
        return self.numbers[obj] if isinstance(obj, fx.Node) else super().persistent_id(obj)

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, torch.device) and obj == self._device:
            return attrgetter("device"), (self._unpickle_state,)
        if (
            isinstance(obj, torch.Tensor)
            and not isinstance(obj, FakeTensor)
            and obj.device.index is not None
        ):
            return torch.Tensor.to, (obj.detach().cpu(), obj.device)
        if not isinstance(obj, FakeTensor):
            return super().reducer_override(obj)
        view = tuple(obj.size()), obj.stride(), obj.storage_offset()
        memory = storage_id(obj), obj.untyped_storage().nbytes()
        return _Reader.tensor, (self._unpickle_state, memory, obj.dtype, obj.fake_device, view)


class _Reader(_UnpickleState):
    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(mode)
        self.device = device
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def tensor(
        self, memory: tuple[int, Any], dtype: torch.dtype, device: torch.device, view: Any
    ) -> FakeTensor:
        number, nbytes = memory
        if number not in self._storages:
            self._storages[number] = _new_storage(nbytes)
        return _fake_on_storage(
            self.fake_mode, self._storages[number], dtype, device, view, self._attributes
        )


class _Nodes(_GraphUnpickler):
    def __init__(self, stream: io.BytesIO, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(stream, _Reader(mode, device))
        self.nodes: list[fx.Node] = []

    def persistent_load(self, pid: Any) -> Any:
        return self.nodes[pid] if isinstance(pid, int) else super().persistent_load(pid)


def bytes_of(graphs: Sequence[fx.GraphModule], beside: Any, device: torch.device) -> bytes:
    """Graphs of one fake mode, with the metadata of their nodes and what they hold, and values that
    belong to them.

    Where they name ``device``, their own, a reader names its own.
    Raises what pickle, or torch, raises of what cannot be written.
    """
    with io.BytesIO() as stream:
        writer = _Writer(stream, device)
        writer.dump(len(graphs))
        for gm in graphs:
            names = (
                str(node.target)
                for node in gm.graph.nodes
                if node.op in ("get_attr", "call_module")
            )
            held = {name: getattr(gm, name) for name in names}
            writer.dump((held, gm.meta, len(gm.graph.nodes)))
            for number, node in enumerate(gm.graph.nodes):
                writer.dump((node.op, node.name, node.target, node.args, node.kwargs, node.meta))
                writer.numbers[node] = number
        writer.dump(beside)
        return stream.getvalue()


def graphs_of(
    data: bytes, mode: FakeTensorMode, device: torch.device
) -> tuple[list[fx.GraphModule], Any]:
    """Return what ``bytes_of`` was given, its tensors and symbols in a new fake mode, on another
    device of its own.
    """
    with io.BytesIO(data) as stream:
        reader, graphs = _Nodes(stream, mode, device), []
        for _ in range(reader.load()):
            held, meta, count = reader.load()
            graph, reader.nodes = fx.Graph(), []
            for _ in range(count):
                op, name, target, args, kwargs, own = reader.load()
                reader.nodes.append(graph.create_node(op, target, args, kwargs, name))
                reader.nodes[-1].meta = own
            graphs.append(lazy_module(held, graph, meta, mode.shape_env))
        return graphs, reader.load()
