"""Graphs as bytes, for other processes that run the same program.

``torch.fx._graph_pickler.GraphPickler`` pickles what graphs hold: operators, symbolic numbers and
what is known about them. It describes a fake tensor by a hundred attributes, and looks through all
arguments of a node. Here a tensor is a view of numbered memory, and a node is its number, which
takes a third of the time.
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


class _Writer(GraphPickler):
    """Writes nodes as numbers, and tensors as views of memory.

    ``_unpickle_state`` stands for the reader's state in what is written.
    """

    def __init__(self, stream: io.BytesIO, device: torch.device) -> None:
        super().__init__(stream, Options(ops_filter=None))
        self.numbers, self._device = dict[fx.Node, int](), device

    def persistent_id(self, obj: object) -> Any:
        return self.numbers[obj] if isinstance(obj, fx.Node) else super().persistent_id(obj)

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, FakeTensor):
            view = tuple(obj.size()), obj.stride(), obj.storage_offset()
            memory = storage_id(obj), obj.untyped_storage().nbytes()
            return _Reader.tensor, (self._unpickle_state, memory, obj.dtype, obj.fake_device, view)
        if isinstance(obj, torch.device) and obj == self._device:
            return attrgetter("device"), (self._unpickle_state,)
        # A constant on a device with a number.
        if isinstance(obj, torch.Tensor) and obj.device.index is not None:
            return torch.Tensor.to, (obj.detach().cpu(), obj.device)
        return super().reducer_override(obj)


class _Reader(_UnpickleState):
    """Makes tensors in the reader's fake mode, on its device."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(mode)
        self.device = device
        self._storages: dict[int, torch.UntypedStorage] = {}
        # Attributes of a fake tensor besides its sizes, by device: tensors of a mode share them.
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def tensor(
        self, memory: tuple[int, Any], dtype: torch.dtype, device: torch.device, view: Any
    ) -> FakeTensor:
        """Return a fake tensor that shows ``view`` (size, stride, offset) of numbered memory."""
        number, nbytes = memory
        # ``resize_storage_bytes_``, and ``as_strided`` of a tensor without elements, ask nothing of
        # symbolic sizes. ``empty`` and ``set_`` would decide whether the result is contiguous,
        # which an unbacked symbol cannot answer.
        if number not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device="meta")
            torch.ops.inductor.resize_storage_bytes_(whole, nbytes)
            self._storages[number] = whole.untyped_storage()
        empty = torch.empty(0, dtype=dtype, device="meta")
        shown = empty.set_(self._storages[number], 0, (0,), (1,)).as_strided(*view)
        if device not in self._attributes:
            self._attributes[device] = dict(vars(FakeTensor(self.fake_mode, shown, device)))
        # ``FakeTensor.__new__`` does the same in four times the time, half of that of all reading.
        made = torch.Tensor._make_subclass(
            FakeTensor, shown, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes[device])
        return made


class _Nodes(_GraphUnpickler):
    """Finds a node that was read before by its number."""

    def __init__(self, stream: io.BytesIO, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(stream, _Reader(mode, device))
        self.nodes: list[fx.Node] = []

    def persistent_load(self, pid: Any) -> Any:
        return self.nodes[pid] if isinstance(pid, int) else super().persistent_load(pid)


def bytes_of(graphs: Sequence[fx.GraphModule], beside: Any, device: torch.device) -> bytes:
    """Return graphs of one fake mode as bytes, with their metadata, attributes and values beside.

    Where a graph names ``device``, the reader has its own device. Raises what pickle or torch
    raises for an object that cannot be written.
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
    """Return the graphs and values that ``bytes_of`` was given, in a fake mode, on ``device``."""
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
