"""Small graphs, and what a rank by itself makes of them."""

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gtrainer import NetModel
from pytest_gtrainer.worlds.simulated.interpreter import Interpreter, PerRank, RankGraph

c10d = torch.ops._c10d_functional


def wait(tensor):
    return c10d.wait_tensor(tensor)


def world_group():
    """The name of the group of all ranks."""
    return dist.group.WORLD.group_name


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def different(size, *shape):
    """A tensor of its own for every rank."""
    return PerRank(numbers(*shape, seed=rank) for rank in range(size))


def run(function, *inputs, net=None, meshes=(), random=None):
    """Trace ``function`` as the first rank and run it for all."""
    size = dist.get_world_size()
    gm = make_fx(function)(*(value[0] if type(value) is PerRank else value for value in inputs))
    return interpreter_of(gm, *meshes, net=net or NetModel.of_world(size), random=random).run(
        inputs
    )


def interpreter_of(gm, *meshes, net=None, random=None):
    net = net or NetModel.of_world(dist.get_world_size())
    return Interpreter(RankGraph.of(gm, *meshes), net, random=random)


def graph_of(build):
    """A graph module whose graph ``build(graph)`` fills; it returns the output."""
    graph = fx.Graph()
    graph.output(build(graph))
    return fx.GraphModule(torch.nn.Module(), graph)


def data_movement(name, size, root):
    """Every collective that only moves data, in the group called ``name``, one after the other."""

    def step(x):
        gathered = wait(c10d.all_gather_into_tensor(x, size, name))
        exchanged = wait(c10d.all_to_all_single(gathered.sin(), [2] * size, [2] * size, name))
        sent = wait(c10d.broadcast(exchanged * x[0], root, name))
        pair = [wait(own) for own in c10d.all_gather_into_tensor_coalesced([x, sent], size, name)]
        return gathered, exchanged, sent, *pair

    return step


class Counted(TorchDispatchMode):
    """Counts how often each operator runs."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.rpartition("::")[2]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))
