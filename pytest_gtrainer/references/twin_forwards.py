"""Judges a module's forward before eager code runs it in chunks, as the chunker of graphs does.

*Idea.* A copy of the module runs twice on fake tensors, on all rows and on those of one chunk. The operators of the
two runs are twins (``passes/chunking/twins``): a shape, a number or a constant that differs depends on how many rows
there are. So both chunkers have the same judge, and the same verdict. *Cost.* Some hundred microseconds an operator and
run, once a module.
"""

from __future__ import annotations

import copy
import logging
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from pytest_gtrainer._torch.autograd import TorchDispatchMode
from pytest_gtrainer._torch.threads import unseen_by_modes
from pytest_gtrainer._torch.tracing import new_fake_mode
from pytest_gtrainer._torch.values import FakeTensorMode, OpOverload, modules_of, pytree
from pytest_gtrainer.passes.chunking.chunk import check_bodies
from pytest_gtrainer.passes.chunking.config import ChunkConfig
from pytest_gtrainer.passes.chunking.regions import Storages, find_regions
from pytest_gtrainer.passes.chunking.twins import Twins, unknown_dims
from pytest_gtrainer.references.following import has_memory, returned_error
from pytest_gtrainer.tracing.model import ModelState

_logger = logging.getLogger(__name__)


def check_twins(fqn: str, graphs: tuple[Any, Any], config: ChunkConfig) -> None:
    """Nothing in a forward mixes rows, and what it returns has them where chunks are joined.

    Raises:
        ChunkError: it is not so, by operator, module and dimension.
    """
    twins = Twins(*graphs, config.num_chunks)
    storages = Storages(twins.full.graph)
    check_bodies(twins, find_regions(twins, config, storages), storages, config)
    for place, node in enumerate(twins.full.graph.output_node().all_input_nodes):
        value, dims = node.meta["val"], twins.dims.get(node)
        if value.ndim > config.dim and dims != [config.dim] and not unknown_dims(value):
            raise returned_error(fqn, value, place, dims, config)


class _Recorder(TorchDispatchMode):
    """A forward on fake tensors as a graph: a node for each operator that gives tensors.

    Raises:
        NotImplementedError: from inside the forward: a collective that would run, an operator with a graph inside.
    """

    supports_higher_order_operators = True

    def __init__(self, fqn: str, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.constants, self.kept = fx.Graph(), SimpleNamespace(), list[Any]()
        self.nodes: dict[int, fx.Node] = {}
        self.meta = {"module_fqn": fqn}
        for place, tensor in enumerate(inputs):
            self._note(tensor, self.graph.placeholder(f"input_{place}"))

    def _note(self, value: Any, node: fx.Node) -> None:
        node.meta = {"val": value, "custom": self.meta}
        if isinstance(value, Tensor):
            self.nodes[id(value)] = node
            self.kept.append(value)  # an id is another's once its tensor is gone

    def _node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self.nodes:  # nobody gave it: a constant
            name = f"constant_{len(self.kept)}"
            setattr(self.constants, name, tensor)
            self._note(tensor, self.graph.create_node("get_attr", name))
        return self.nodes[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not isinstance(func, OpOverload) or func.namespace == "c10d":
            raise NotImplementedError(func)
        made = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(made)):
            given = pytree.tree_map_only(Tensor, self._node_of, (args, kwargs or {}))
            node = self.graph.create_node("call_function", func, *given)
            self._note(made, node)
            for place, item in enumerate(made if isinstance(made, tuple | list) else ()):
                self._note(item, self.graph.call_function(operator.getitem, (node, place)))
        return made

    def finish(self, returned: Any) -> Any:
        """The graph with its constants, as twins are read."""
        self.graph.output(pytree.tree_map_only(Tensor, self._node_of, returned))
        self.constants.graph = self.graph
        return self.constants


def twin_graphs(
    fqn: str, run: Callable[..., Any], whole: Mapping[str, Any], part: Mapping[str, Any]
) -> tuple[Any, Any] | None:
    """A module's forward on all rows and on those of one chunk, as graphs; nothing is computed or written.

    A copy of the module runs on fake tensors, so what it keeps of a forward is not kept in the module.

    Args:
        run: its forward, a method of the module.

    Returns:
        None where fake tensors cannot stand for real ones: a sharded module inside, a decision on data, a collective
        that is not functional, FlexAttention.
    """
    run = run if isinstance(run, MethodType) else getattr(run, "__wrapped__", run)
    module = getattr(run, "__self__", None)
    given = [value for arguments in (whole, part) for value in arguments.values()]
    if not isinstance(run, MethodType) or not isinstance(module, nn.Module):
        return None
    if not all(value is None or has_memory(value) for value in given):
        return None
    inner = [m for m in module.modules() if m is not module]
    tensors = [*module.parameters(), *module.buffers()]
    if not all(map(has_memory, tensors)) or any("forward" in m.__dict__ for m in inner):
        return None
    try:
        # set_stance, or Dynamo's caches change; what the module warns of, it warns of when it runs
        with unseen_by_modes(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            mode = new_fake_mode(real_inputs=True)
            full, chunk = (_recorded(fqn, module, run.__func__, arguments, mode) for arguments in (whole, part))
            return full, chunk
    except Exception as error:
        _logger.debug("%s is followed while it runs: on fake tensors it raises %r", fqn, error)
        return None


def _recorded(
    fqn: str, module: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any], mode: FakeTensorMode
) -> Any:
    copied = _copied(module)
    state = ModelState.of(copied)

    def fake(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
        )
        return made.clone()  # no leaf: a forward may write to it

    with mode:
        fakes = [fake(tensor) for tensor in state.tensors]
        inputs = {name: None if value is None else fake(value) for name, value in arguments.items()}
        recorder = _Recorder(fqn, [*(value for value in inputs.values() if value is not None), *fakes])
        with state.exchanged(fakes), recorder:
            return recorder.finish(forward(copied, **inputs))


def _own(value: Any, depth: int) -> Any:
    """What a forward may keep something in, ``depth`` levels deep: containers, and objects of plain classes."""
    kind, is_torchs = type(value), isinstance(value, nn.Module) or type(value).__module__.startswith("torch")
    plain = kind.__new__ is object.__new__ and hasattr(value, "__dict__") and not is_torchs
    if not depth or not (plain or isinstance(value, dict | list | set)):
        return value
    made = copy.copy(value)
    if isinstance(made, list):
        made[:] = [_own(item, depth - 1) for item in made]
    elif not isinstance(made, set):
        table = made if isinstance(made, dict) else made.__dict__
        table.update({name: _own(item, depth - 1) for name, item in table.items()})
    return made


def _copied(module: nn.Module) -> nn.Module:
    """The module, and objects that it holds, with tables, lists and dicts of their own, on the same tensors."""
    copied = object.__new__(type(module))
    copied.__dict__.update({name: _own(value, 3) for name, value in module.__dict__.items()})
    children = modules_of(copied)
    children.update({name: child and _copied(child) for name, child in children.items()})
    return copied
