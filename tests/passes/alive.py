"""Storages alive while a graph runs, counted by a mode, against the estimate of ``peak_memory``."""

import gc
import time

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_gtrainer import peak_memory
from pytest_gtrainer._torch.values import OpOverload


class Alive(TorchDispatchMode):
    """Bytes of all storages that are alive behind each operator, inputs included.

    A storage is alive as long as anybody holds it, in Python or C++. Of a collective that copies no
    operand, NCCL holds the operands until the wait; gloo does not, so here they are held. It lets
    go of results in a thread of its own, right behind the wait.
    """

    def __init__(self, inputs):
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.ran: list[tuple[str, int]] = []
        self.shapes: list[list[torch.Size]] = []
        self.stash = {}
        self.note(inputs)

    def note(self, values):
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.known.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "wait_tensor" in str(func):
            self.stash.pop(args[0].untyped_storage()._cdata, None)
            time.sleep(0.01)
        elif str(func).startswith("_c10d_functional.") and "all_reduce" not in str(func):
            held = args, kwargs, result
            self.stash.update({t.untyped_storage()._cdata: held for t in tree_leaves(result)})
        self.note(result)
        self.known = {
            key: (ref, nbytes) for key, (ref, nbytes) in self.known.items() if not ref.expired()
        }
        self.ran.append((str(func), sum(nbytes for _, nbytes in self.known.values())))
        self.shapes.append(
            [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        )
        return result


def run(gm, inputs):
    """Run the graph's generated code: each node that calls an operator, with the bytes and shapes
    that it left.
    """
    gc.collect()
    mode = Alive(inputs)
    with torch.no_grad(), mode:
        gm(*inputs)
    ran = list(zip(mode.ran, mode.shapes, strict=True))
    found = {}
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.reshape.default:  # torch takes it apart
            del ran[: 1 if ran[0][0][0] == "aten.view.default" else 2]
        elif isinstance(node.target, OpOverload) and any(
            "Tensor" in str(r.type) for r in node.target._schema.returns
        ):
            (name, nbytes), shapes = ran.pop(0)
            assert name == str(node.target), node.name
            found[node.name] = nbytes, shapes
        elif ran and ran[0][0][0] == str(node.target):
            del ran[0]
    assert found
    assert not ran
    return found


def differing(gm, found, sizes=None):
    """Return the nodes after which the number of live bytes differs from that of
    ``peak_memory``.
    """
    curve = peak_memory(gm, sizes=sizes).curve
    return {
        name: (nbytes, curve[name]) for name, (nbytes, _) in found.items() if nbytes != curve[name]
    }


def sizes_of(gm, found):
    """The number of each symbol, from the shapes that the run had."""
    numbers = {}
    for node in gm.graph.nodes:
        values = [
            leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)
        ]
        for value, shape in zip(values, found.get(node.name, (0, ()))[1], strict=False):
            for size, number in zip(value.shape, shape, strict=True):
                if type(size) is torch.SymInt:
                    expressions = size.node.expr, size.node.shape_env.simplify(size.node.expr)
                    numbers |= {str(symbol): number for symbol in expressions if symbol.is_symbol}
    return numbers
