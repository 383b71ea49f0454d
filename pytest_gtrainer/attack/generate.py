"""Generate graphs: of every kind of operator, with views, writes, fresh buffers, random numbers.

A graph is a function of its inputs: memory that nobody has written is not read.
"""

import math
import operator as python
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from pytest_gtrainer._torch.graph_modules import lazy_module
from pytest_gtrainer._torch.passes import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT
from pytest_gtrainer._torch.process_groups import group_ranks, names_of_live_groups
from pytest_gtrainer._torch.values import FakeTensor, FakeTensorMode, OpOverload, pytree
from pytest_gtrainer.attack.extract import computed, extract
from pytest_gtrainer.graph.collectives import launches
from pytest_gtrainer.graph.nodes import held, input_fqn, is_view, is_wait, short_name

aten = torch.ops.aten

_UNARY = (
    aten.relu,
    aten.neg,
    aten.exp,
    aten.tanh,
    aten.sigmoid,
    aten.abs,
    aten.sin,
    aten.silu,
    aten.clone,
    aten.alias,
    aten.detach,
)
_BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum, aten.minimum)
_SCALAR = (aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.rsub.Scalar)
_NUMBERS = (1, 2, 4.0, 0.5, -1, 3.0)
_FRESH = (aten.empty_like, aten.zeros_like, aten.ones_like, aten.rand_like, aten.randn_like)
_WRITES = (aten.add_.Tensor, aten.mul_.Tensor, aten.copy_.default)
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)
_COMPARISONS = (aten.gt.Tensor, aten.le.Tensor, aten.eq.Tensor)
_SUMS = ("sum", "avg")
_COPIES = (aten.clone.default, aten.constant_pad_nd.default, aten._to_copy.default)
_MOST_ELEMENTS = 2**14
_IN_BODIES = (aten.relu, aten.neg, aten.exp, aten.tanh, aten.sin)
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def generate(
    seed: int,
    nodes: int = 60,
    ranks: int = 0,
    model: fx.GraphModule | None = None,
    functional: bool = False,
) -> fx.GraphModule:
    """Return a graph of about as many nodes.

    Args:
        seed: of everything that is drawn; it makes the same graph again, with the same number of
            nodes and ranks.
        nodes: how many operators are tried; some do not fit.
        ranks: with 2 or more the graph has collectives. A world of this size has to be up.
        model: a graph of which a part is taken, half of the time with further nodes behind it. It
            stays as it is.
        functional: nothing is written to, as in graphs that AOTAutograd leaves to Inductor.
    """
    return _Maker(seed, ranks, functional).make(nodes, model)


@dataclass
class _Maker:
    """A graph that grows, node by node."""

    seed: int
    ranks: int
    functional: bool
    graph: fx.Graph = field(default_factory=fx.Graph)
    floats: list[fx.Node] = field(default_factory=list)
    started: list[fx.Node] = field(default_factory=list)
    parameters: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)
    unwritten: list[fx.Node] = field(default_factory=list)
    communicated: list[fx.Node] = field(default_factory=list)
    copied: list[fx.Node] = field(default_factory=list)
    averaged: list[fx.Node] = field(default_factory=list)
    bodies: dict[str, fx.GraphModule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.groups = _groups_of_world() if self.ranks > 1 else []
        self.sizes = [self.dice.choice((2, 3, 4, 6, 8)) for _ in range(3)]

    def make(self, nodes: int, model: fx.GraphModule | None) -> fx.GraphModule:
        """Return a graph of about ``nodes`` nodes, which may begin with a part of ``model``."""
        more = nodes
        if model is not None:
            self._take_part_of(model, nodes)
            more = self.dice.choice((0, nodes // 2))
        if not self.floats:
            self._make_inputs()
        self.places = self._input("places", torch.int64, [self.dice.choice(self.sizes)])
        if self.ranks > 1:
            self._make_parameters()

        steps = self._steps()
        # As in a joint graph: what follows a place chosen by chance is the backward's.
        self.backward_from = len(self.graph.nodes) + self.dice.randrange(2 * more + 1)
        for _ in range(more):
            self.dice.choice(steps)()

        for launch in list(self.started):
            self._wait(launch)
        for launch in self.averaged:
            self._return_average(launch)
        # What nobody has written is no result, and nobody may read it.
        for buffer in list(self.unwritten):
            self._write_whole(buffer)
        self._return()
        self._put_inputs_first()
        self._forget_numbers()

        attributes = {}
        for node in self.graph.find_nodes(op="get_attr"):
            name = str(node.target)
            attributes[name] = self.bodies[name] if name in self.bodies else held(model, name)
        # Its code is generated when it is run, as most of these graphs never are.
        return lazy_module(attributes, self.graph, {}, None)

    def _make_inputs(self) -> None:
        for place in range(self.dice.randint(2, 5)):
            shape = [self.dice.choice(self.sizes) for _ in range(self.dice.randint(1, 3))]
            if self.dice.random() < 0.2:
                shape[self.dice.randrange(len(shape))] = 1
            self._input(f"x{place}", torch.float32, shape)

    def _make_parameters(self) -> None:
        """Make shards of parameters of two layers; each is gathered over one group."""
        self.group_of = {}
        self.dtype_of: dict[fx.Node, torch.dtype] = {}
        self.chain_of: dict[fx.Node, list[fx.Node]] = {}
        # FSDP gathers its shards in one way, and nobody else reads them. Other graphs do as they
        # like.
        self.is_fsdp = self.dice.random() < 0.5
        group = self.dice.choice(self.groups)
        self.reduction_of_all = self._choose_reduction() if self.is_fsdp else None
        for name in ("layers.0.weight", "layers.0.bias", "layers.1.weight"):
            shape = [self.dice.choice(self.sizes) for _ in range(self.dice.randint(1, 2))]
            node = self._input(name, torch.float32, shape, "parameter")
            self.group_of[node] = self.dice.choice((group, group, *self.groups))
            self.parameters.append(node)
            if self.is_fsdp:
                self.floats.remove(node)
                if self.dice.random() < 0.3:
                    self.dtype_of[node] = torch.bfloat16

    def _take_part_of(self, model: fx.GraphModule, nodes: int) -> None:
        """Begin with so many successive nodes of a model's graph, which run on zeros."""
        calls = computed(model)
        begin = self.dice.randrange(max(1, len(calls) - nodes + 1))
        part = extract(model, calls[begin : begin + nodes])
        copies: dict[fx.Node, fx.Node] = {}
        for node in part.graph.nodes:
            if node.op == "output":
                continue
            copies[node] = copy = self.graph.node_copy(node, copies.__getitem__)
            if node.op == "placeholder":
                copy.meta["val"] = pytree.tree_map_only(Tensor, _zeros_like, node.meta["val"])
            elif node.op == "get_attr":
                copy.meta["val"] = held(model, str(node.target))
            else:
                args, kwargs = pytree.tree_map(_value, (copy.args, copy.kwargs))
                copy.meta["val"] = node.target(*args, **kwargs)
            self._note_taken(copy)

    def _note_taken(self, node: fx.Node) -> None:
        """Note a node of a model as an operand of further ones, or as one to wait for."""
        if launches(node.target):
            self.started.append(node)
            return
        for operand in node.all_input_nodes:
            if is_wait(node) and operand in self.started:
                self.started.remove(operand)
        value = node.meta["val"]
        is_number = isinstance(value, Tensor) and value.is_floating_point() and value.numel()
        if is_number and "empty" not in short_name(node):
            self.floats.append(node)

    def _put_inputs_first(self) -> None:
        """Move the inputs of generated nodes in front of a model's nodes, as tracers place them."""
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        for node in self.graph.find_nodes(op="placeholder"):
            if first < node:
                first.prepend(node)

    def _forget_numbers(self) -> None:
        """Replace the values of all nodes by fake ones."""
        # Operators run on small real tensors, as fake ones take ten times as long.
        mode = FakeTensorMode()

        def fake(value: Tensor) -> Tensor:
            # ``mode.from_tensor`` makes the base of each view again, at half the time of a graph.
            size, stride = value.shape, value.stride()
            meta = torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
            return FakeTensor(mode, meta, value.device)

        for graph in (self.graph, *(body.graph for body in self.bodies.values())):
            for node in graph.nodes:
                value = node.meta.get("val")
                if isinstance(value, Tensor):  # as most are: to map a tree takes longer
                    node.meta["val"] = fake(value)
                elif value is not None:
                    node.meta["val"] = pytree.tree_map_only(Tensor, fake, value)

    def _steps(self) -> Sequence[Callable[[], Any]]:
        """Return what a step may do; what stands twice is drawn twice as often."""
        steps = [
            *([self._unary] * 3),
            *([self._binary] * 4),
            *([self._scalar] * 3),
            *([self._again] * 3),
            *([self._product] * 2),
            *([self._view] * 4),
            *([self._fresh] * 2),
            self._reduce,
            self._softmax,
            self._cast,
            self._choose,
            self._join,
            self._cut,
            self._look_up,
            self._spread,
            self._pad,
            self._use_size,
            self._call_body,
        ]
        if not self.functional:
            steps += [self._write] * 2
        if self.ranks > 1:
            steps += [self._communicate] * 4
            steps += [self._gather_parameter] * 3
            steps += [self._reduce_gradient] * 2
            steps += [self._wait_for_one] * 3
            if self.functional:
                # What torch's passes fuse; ours take graphs with writes.
                steps += [self._average_gradient] * 2
                steps += [self._gather_for_product] * 2
                steps += [self._scatter_product] * 2
        return steps

    def _input(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], kind: str = "input"
    ) -> fx.Node:
        value = torch.zeros(*shape, dtype=dtype)
        if len(shape) > 1 and self.dice.random() < 0.2:
            value = torch.zeros(*shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
        node = self.graph.placeholder(name.replace(".", "_"))
        node.meta.update(val=value, gt_input={"kind": kind, "fqn": name})
        if dtype.is_floating_point:
            self.floats.append(node)
        return node

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node | None:
        """Add a node; return None if the operator does not take these operands."""
        if not isinstance(target, OpOverload):
            target = target.default
        values = map_arg((args, kwargs), _value)
        try:
            value = target(*values[0], **values[1])
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            return None
        # With many ranks a gather of a gather would fill the memory.
        for each in (value,) if isinstance(value, Tensor) else pytree.tree_leaves(value):
            if isinstance(each, Tensor) and each.numel() > _MOST_ELEMENTS:
                return None
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        if len(self.graph.nodes) > self.backward_from:
            node.meta["autograd_backward"] = True
        if target in _COPIES:
            self.copied += [node, *node.all_input_nodes]
        elif is_view(target) and isinstance(value, Tensor) and args[0] in self.copied[-8:]:
            self.copied.append(node)  # a write to it is one to the copy, or to what was copied
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            self.floats.append(node)
        return node

    def _any(self) -> fx.Node:
        """Choose an operand, a late one more often, so that graphs are deep."""
        count = len(self.floats)
        # Operands drawn evenly would make wide graphs of two or three levels.
        if self.dice.random() < 0.6:
            return self.floats[self.dice.randrange(max(0, count - 8), count)]
        return self.dice.choice(self.floats)

    def _like(self, node: fx.Node) -> fx.Node:
        """Choose an operand of the same shape and dtype, this one if there is no other."""
        return self.dice.choice(self._alike(node))

    def _alike(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands of the same shape and dtype."""
        value = node.meta["val"]
        alike = []
        for other in self.floats:
            given = other.meta["val"]
            if given.shape == value.shape and given.dtype == value.dtype:
                alike.append(other)
        return alike

    def _with_rows(self, node: fx.Node) -> list[fx.Node]:
        """Return the matrices of as many rows and of the same dtype."""
        rows, dtype = node.meta["val"].shape[0], node.meta["val"].dtype
        found = []
        for other in self.floats:
            given = other.meta["val"]
            if given.ndim == 2 and given.shape[0] == rows and given.dtype == dtype:
                found.append(other)
        return found

    def _unary(self) -> None:
        self._call(self.dice.choice(_UNARY), self._any())

    def _binary(self) -> None:
        node = self._any()
        other = self._any()
        if self.dice.random() < 0.8 or not _can_broadcast(node, other):
            other = self._like(node)
        operator = self.dice.choice(_BINARY)
        if operator in (aten.add.Tensor, aten.sub.Tensor) and self.dice.random() < 0.3:
            self._call(operator, node, other, alpha=self.dice.choice(_NUMBERS))
        else:
            self._call(operator, node, other)

    def _scalar(self) -> None:
        self._call(self.dice.choice(_SCALAR), self._any(), self.dice.choice(_NUMBERS))

    def _again(self) -> None:
        """Call an operator once more on the same operands: for passes that merge."""
        made = []
        for node in self.floats:
            is_aten = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
            if is_aten and node.target is not aten.empty_like.default:
                made.append(node)
        if made:
            node = self.dice.choice(made[-12:])
            args, kwargs = node.args, dict(node.kwargs)
            # Or on operands in another order, which is the same for some operators only; or with
            # another dimension, index or factor.
            change = self.dice.random()
            if len(args) == 2 and change < 0.3:
                args = args[::-1]
            elif change > 0.6 and "alpha" in kwargs:
                kwargs["alpha"] = self.dice.choice(_NUMBERS)
            elif change > 0.6:
                args = self._with_another_literal(args)
            self._call(node.target, *args, **kwargs)

    def _with_another_literal(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arguments of which one number, or the order of one list, is another one."""
        places = []
        for place, each in enumerate(args):
            is_list = isinstance(each, list | tuple) and len(each) > 1
            if type(each) in (int, float) or is_list:
                places.append(place)
        if not places:
            return args
        place = self.dice.choice(places)
        literal = args[place]
        if isinstance(literal, list | tuple):
            other: Any = list(literal)[::-1]
        elif isinstance(literal, int):
            other = literal + self.dice.choice([-1, 1])
        else:
            other = self.dice.choice(_NUMBERS)
        return (*args[:place], other, *args[place + 1 :])

    def _product(self) -> None:
        node = self._any()
        shape = node.meta["val"].shape
        if len(shape) == 2:
            other = self._call(aten.t, self._like(node))
            product = self._call(aten.mm, node, other)
            if product is not None and self.dice.random() < 0.3:
                # Projections read one value, and may be of other widths.
                self._call(aten.mm, node, self.dice.choice(self._with_rows(other)))
            if product is not None and self.dice.random() < 0.3:
                self._call(aten.addmm, self._like(product), node, other)
            if product is not None and self.dice.random() < 0.5:
                self._call(aten.add.Tensor, product, self._like(product))
        elif len(shape) == 3:
            self._call(aten.bmm, node, self._call(aten.transpose.int, self._like(node), 1, 2))

    def _view(self) -> None:
        """Add a view of a value, or a reshape, of a kind that its shape allows."""
        node = self._any()
        shape = list(node.meta["val"].shape)
        dims = len(shape)
        kind = self.dice.randrange(7)
        if kind == 0 and dims == 2:
            self._call(aten.t, node)
        elif kind == 1 and dims:
            self._call(aten.permute, node, self.dice.sample(range(dims), dims))
        elif kind == 2 and dims:
            dim = self.dice.randrange(dims)
            start = self.dice.randrange(shape[dim])
            self._call(
                aten.slice.Tensor, node, dim, start, self.dice.randint(start + 1, shape[dim])
            )
        elif kind == 3 and dims:
            dim = self.dice.randrange(dims)
            self._call(aten.select.int, node, dim, self.dice.randrange(shape[dim]))
        elif kind == 4:
            self._call(aten.unsqueeze, node, self.dice.randint(0, dims))
        elif kind == 5:
            self._call(aten.view if node.meta["val"].is_contiguous() else aten.reshape, node, [-1])
        elif dims >= 2:
            self._call(aten.reshape, node, [shape[0] * shape[1], *shape[2:]])

    def _fresh(self) -> None:
        """Make buffers alike, one or two, which are written later if they are empty."""
        # An empty buffer has to be written to.
        choices = _FRESH[1:] if self.functional else _FRESH
        made_by, node = self.dice.choice(choices), self._any()
        for _ in range(self.dice.randint(1, 2)):
            made = self._call(made_by, node)
            if made is not None and made_by is aten.empty_like:
                self.floats.remove(made)
                self.unwritten.append(made)

    def _write(self) -> None:
        if self.unwritten and self.dice.random() < 0.8:
            self._write_whole(self.unwritten[0])
            return
        target, chance = self._any(), self.dice.random()
        # A parameter is updated in place, and so is what was gathered or reduced; passes that merge
        # or move collectives must see it.
        if self.parameters and chance < 0.2:
            target = self.dice.choice([*self.parameters, *self.communicated])
        elif self.copied and chance < 0.5:
            # Only a write tells a copy from what it is of.
            target = self.dice.choice(self.copied[-8:])
        self._write_to(target)

    def _write_to(self, target: fx.Node) -> None:
        if _has_elements_twice(target.meta["val"]):
            return  # kernels refuse it, but for a copy of a tensor to itself
        self._call(
            self.dice.choice(_WRITES), target, self.dice.choice(self._alike(target) or [target])
        )

    def _write_whole(self, buffer: fx.Node) -> None:
        """Fill an empty buffer, or copy something into it; then it may be read."""
        alike = self._alike(buffer)
        if alike and self.dice.random() < 0.5:
            self._call(aten.copy_, buffer, self.dice.choice(alike))
        else:
            self._call(aten.fill_.Scalar, buffer, self.dice.choice(_NUMBERS))
        self.unwritten.remove(buffer)
        self.floats.append(buffer)

    def _reduce(self) -> None:
        node = self._any()
        dims = node.meta["val"].ndim
        if dims:
            keep = self.dice.random() < 0.5
            self._call(self.dice.choice(_REDUCTIONS), node, [self.dice.randrange(dims)], keep)

    def _softmax(self) -> None:
        node = self._any()
        if node.meta["val"].ndim:
            self._call(aten._softmax, node, node.meta["val"].ndim - 1, False)

    def _cast(self) -> None:
        self._call(aten._to_copy, self._any(), dtype=self.dice.choice(_DTYPES))

    def _choose(self) -> None:
        node = self._any()
        mask = self._call(self.dice.choice(_COMPARISONS), node, self._like(node))
        if mask is not None:
            self._call(aten.where.self, mask, node, self._like(node))

    def _join(self) -> None:
        node = self._any()
        if node.meta["val"].ndim:
            dim = self.dice.randrange(node.meta["val"].ndim)
            self._call(aten.cat, [node, self._like(node)], dim)

    def _cut(self) -> None:
        node = self._any()
        if not node.meta["val"].ndim:
            return
        dim = self.dice.randrange(node.meta["val"].ndim)
        parts = self._call(aten.split.Tensor, node, 2, dim)
        if parts is None:
            return
        for place, value in enumerate(parts.meta["val"]):
            item = self.graph.call_function(python.getitem, (parts, place))
            item.meta["val"] = value
            self.floats.append(item)

    def _look_up(self) -> None:
        node = self._any()
        if node.meta["val"].ndim == 2:
            self._call(aten.embedding, node, self.places)

    def _spread(self) -> None:
        node = self._any()
        shape = node.meta["val"].shape
        wider = [self.dice.choice(self.sizes) if size == 1 else size for size in shape]
        self._call(aten.expand, node, [self.dice.choice(self.sizes), *wider])

    def _pad(self) -> None:
        """Pad the last dimension; by nothing half of the time, as tracers of shards do."""
        node = self._any()
        if node.meta["val"].ndim:
            # The last one shifts: the extent stays, and the elements do not.
            pads = self.dice.choice(((0, 0), (0, 0), (0, 0), (0, 1), (0, 2), (1, -1)))
            self._call(aten.constant_pad_nd, node, list(pads), 0.0)

    def _use_size(self) -> None:
        """Read an extent and give it to another operator, as graphs of dynamic sizes do."""
        node = self._any()
        shape = list(node.meta["val"].shape)
        if not shape:
            return
        dim = self.dice.randrange(len(shape))
        size = self._call(aten.sym_size.int, node, dim)
        others = shape[:dim] + shape[dim + 1 :]
        kind = self.dice.randrange(4)
        if kind == 0:
            self._call(aten.slice.Tensor, self._like(node), dim, self.dice.randrange(2), size)
        elif kind == 1:
            spread = self._any()
            self._call(aten.expand, spread, [size, *spread.meta["val"].shape])
        elif kind == 2:
            self._call(aten.reshape, self._like(node), [size, math.prod(others)])
        else:
            self._call(aten.full, [size, *others], self.dice.choice(_NUMBERS))

    def _call_body(self) -> None:
        """Now and then, call a graph inside the graph, or one of two."""
        if self.dice.random() > 0.3:
            return
        node = self._any()
        operator: Any = torch.ops.higher_order.invoke_subgraph
        body, value = self._body(node)
        args: tuple[Any, ...] = (body, str(body.target), node)
        if self.dice.random() < 0.5:
            # The branch depends on numbers, as a check of overflow does.
            total = self._call(aten.sum, node)
            decides = self._call(aten.gt.Scalar, total, 0)
            operator = torch.ops.higher_order.cond
            args = (decides, body, self._body(node)[0], (node,))
        called = self.graph.call_function(operator, args)
        called.meta["val"] = (value,)
        result = self.graph.call_function(python.getitem, (called, 0))
        result.meta["val"] = value
        self.floats.append(result)

    def _body(self, node: fx.Node) -> tuple[fx.Node, Tensor]:
        """Return a body that takes a node, as an attribute, and the value of its result."""
        graph = fx.Graph()
        last = graph.placeholder("given")
        last.meta["val"] = node.meta["val"]
        for _ in range(self.dice.randint(1, 3)):
            operator = self.dice.choice(_IN_BODIES).default
            made = graph.call_function(operator, (last,))
            made.meta["val"] = operator(last.meta["val"])
            last = made
        graph.output((last,))
        name = f"generated_body_{len(self.bodies)}"
        self.bodies[name] = fx.GraphModule({}, graph)
        return self.graph.get_attr(name), last.meta["val"]

    def _communicate(self) -> None:
        node, (group, size) = self._any(), self.dice.choice(self.groups)
        kind = self.dice.randrange(4)
        shape = node.meta["val"].shape
        started = None
        if kind == 0:
            started = self._call(ALL_REDUCE, node, self.dice.choice(_SUMS), group)
        elif kind == 1:
            started = self._call(ALL_GATHER, node, size, group)
        elif shape and shape[0] % size == 0:
            if kind == 2:
                started = self._call(REDUCE_SCATTER, node, self.dice.choice(_SUMS), size, group)
            else:
                splits = [shape[0] // size] * size
                started = self._call(ALL_TO_ALL, node, splits, splits, group)
        self._begin(started)

    def _begin(self, launch: fx.Node | None) -> None:
        """Note a collective, if there is one: nobody reads it before it is waited for."""
        if launch is not None:
            self.floats.remove(launch)
            self.started.append(launch)

    def _gather_parameter(self) -> None:
        """Gather a parameter, which may be gathered already, as it is or changed before."""
        parameter = self.dice.choice(self.parameters)
        shard: fx.Node | None = parameter
        chain: list[fx.Node] = []
        if parameter in self.dtype_of:
            shard = self._call(aten._to_copy, shard, dtype=self.dtype_of[parameter])
        elif parameter in self.chain_of and self.dice.random() < 0.5:
            # As it was gathered before.
            for node in self.chain_of[parameter]:
                shard = self._call(node.target, shard, *node.args[1:], **node.kwargs)
        elif not self.is_fsdp and self.dice.random() < 0.6:
            for _ in range(self.dice.randint(1, 2)):
                shard = self._changed(shard or parameter)
                chain += [shard] if shard is not None else []
            self.chain_of[parameter] = chain
        if shard is None:
            return
        may_write = not self.functional and not self.is_fsdp
        if may_write and self.dice.random() < 0.1:
            # What was read of the parameter so far is of before.
            self._write_to(self.dice.choice([parameter, shard]))
        group, size = self.group_of[parameter]
        launch = self._call(ALL_GATHER, shard, size, group)
        if launch is not None:
            # A tied parameter is gathered by another module, too.
            owner = self.dice.choice(self.parameters) if self.dice.random() < 0.2 else parameter
            fqn = input_fqn(owner).rpartition(".")[0]
            launch.meta["custom"] = {"module_fqn": fqn}
        self._begin(launch)

    def _changed(self, node: fx.Node) -> fx.Node | None:
        """Compute something of one operand."""
        kind = self.dice.randrange(5)
        if kind == 0:
            return self._call(aten._to_copy, node, dtype=self.dice.choice(_DTYPES))
        if kind == 1:
            return self._call(self.dice.choice(_UNARY), node)
        if kind == 2:
            return self._call(self.dice.choice(_SCALAR), node, self.dice.choice(_NUMBERS))
        if kind == 3:
            return self._call(aten.constant_pad_nd, node, [0, self.dice.randrange(2)], 0.0)
        return self._call(self.dice.choice((aten.rand_like, aten.relu)), node)

    def _choose_reduction(self) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
        """Return the collectives that reduce a gradient, each with reduction and group."""
        # Two dimensions of a mesh as a rule; now and then groups that share ranks, or are one.
        chosen = self.dice.sample(self.groups, 2) if len(self.groups) > 1 else self.groups * 2
        if self.dice.random() < 0.3:
            chosen = self.dice.choices(self.groups, k=2)
        (replicas, _), (shards, size) = chosen
        reductions = [self.dice.choice(_SUMS)] * 2
        if self.dice.random() < 0.2:
            reductions[0] = self.dice.choice((*_SUMS, "max", "min"))
        sums = ALL_REDUCE, (reductions[0], replicas)
        scatters = REDUCE_SCATTER, (reductions[1], size, shards)
        # DTensor reduces among replicas first, FSDP2 scatters first; without replicas that is all.
        return self.dice.choice(((sums, scatters), (sums, scatters), (scatters, sums), (scatters,)))

    def _reduce_gradient(self) -> None:
        """Add a result: a value reduced among replicas and scattered, as in hybrid sharding."""
        operand = self._any()
        reduction = self.reduction_of_all or self._choose_reduction()
        [size] = [settings[1] for target, settings in reduction if target is REDUCE_SCATTER]
        for _ in range(3):
            shape = operand.meta["val"].shape
            if shape and shape[0] % size == 0:
                break
            operand = self._any()
        node: fx.Node | None = operand
        for target, settings in reduction:
            shape = node.meta["val"].shape if node is not None else ()
            if target is REDUCE_SCATTER and (not shape or shape[0] % settings[1]):
                return
            launch = self._call(target, node, *settings)
            if launch is None:
                return
            self.floats.remove(launch)
            wait = self._call(WAIT, launch)
            assert wait is not None
            self.communicated.append(wait)
            if not self.functional and self.dice.random() < 0.15:
                # Whoever moves a collective behind this reads another gradient.
                self._write_to(operand)
            if self.dice.random() < 0.85:
                self.floats.remove(wait)  # nobody else reads it
            node = wait
            if self.dice.random() < 0.3:
                node = self._changed(wait)
        if node is not None:
            self.results.append(node)

    def _average_gradient(self) -> None:
        """Divide a value and sum it among replicas, as DDP under ``torch.compile`` does."""
        group, size = self.group_of[self.parameters[0]]
        if self.dice.random() < 0.1:
            group, size = self.dice.choice(self.groups)
        quotient = self._call(aten.div.Tensor, self._any(), size)
        launch = self._call(ALL_REDUCE, quotient, "sum", group)
        if launch is not None:
            self.floats.remove(launch)
            self.averaged.append(launch)
        while self.averaged and self.dice.random() < 0.4:
            self._return_average(self.averaged.pop(0))

    def _return_average(self, launch: fx.Node) -> None:
        """Wait for a sum of gradients and return it; as a rule nobody else reads it."""
        wait = self._call(WAIT, launch)
        assert wait is not None
        self.results.append(wait)
        if self.dice.random() < 0.9:
            self.floats.remove(wait)

    def _gather_for_product(self) -> None:
        """Gather rows of a matrix, or of each matrix of a batch, and multiply all of them.

        Tensor parallelism with sequences does so.
        """
        node, (group, size) = self._any(), self.dice.choice(self.groups)
        shape = list(node.meta["val"].shape)
        if len(shape) not in (2, 3):
            return
        launch = self._call(ALL_GATHER, node, size, group)
        if launch is None:
            return
        self.floats.remove(launch)
        gathered = self._call(WAIT, launch)
        assert gathered is not None
        if len(shape) == 3 and self.dice.random() < 0.7:
            gathered = self._call(aten.cat, self._parts(gathered, size, 0), 1)
            if gathered is not None and self.dice.random() < 0.2:
                # Rows that were padded are cut off.
                rows = self.dice.randint(1, gathered.meta["val"].shape[1])
                gathered = self._call(aten.slice.Tensor, gathered, 1, 0, rows)
        for _ in range(self.dice.randint(1, 2)):
            if gathered is not None:
                self._multiply_rows(gathered)

    def _scatter_product(self) -> None:
        """Multiply, then reduce the product and scatter its rows, or those of each matrix."""
        (group, size), product = self.dice.choice(self.groups), self._multiply_rows(self._any())
        if product is None:
            return
        dim = self.dice.randrange(product.meta["val"].ndim)
        if product.meta["val"].shape[dim] % size:
            return
        if dim:
            product = self._call(aten.cat, self._parts(product, size, dim), 0)
        launch = self._call(REDUCE_SCATTER, product, self.dice.choice(_SUMS), size, group)
        if launch is not None:
            self.floats.remove(launch)
            self._call(WAIT, launch)

    def _parts(self, node: fx.Node, count: int, dim: int) -> list[fx.Node]:
        """Cut a value in as many parts, by a split or slices; now and then they change places."""
        extent = node.meta["val"].shape[dim] // count
        parts: list[fx.Node] = []
        if self.dice.random() < 0.5:
            split = self._call(aten.split.Tensor, node, extent, dim)
            assert split is not None
            for place, value in enumerate(split.meta["val"]):
                item = self.graph.call_function(python.getitem, (split, place))
                item.meta["val"] = value
                parts.append(item)
        else:
            for begin in range(0, extent * count, extent):
                part = self._call(aten.slice.Tensor, node, dim, begin, begin + extent)
                assert part is not None
                self.floats.remove(part)  # as a rule nobody else reads it
                parts.append(part)
        if self.dice.random() < 0.1:
            self.dice.shuffle(parts)
        return parts

    def _multiply_rows(self, node: fx.Node) -> fx.Node | None:
        """Multiply the rows of a matrix, or of a batch of matrices, by a matrix that fits."""
        value = node.meta["val"]
        if value.ndim not in (2, 3):
            return None
        fit = []
        for other in self.floats:
            given = other.meta["val"]
            if given.ndim == 2 and given.dtype == value.dtype and value.shape[-1] in given.shape:
                fit.append(other)
        if not fit:
            return None
        weight = self.dice.choice(fit)
        if weight.meta["val"].shape[0] != value.shape[-1]:
            weight = self._call(aten.t, weight)
        rows: fx.Node | None = node
        if value.ndim == 3:
            rows = self._call(aten.reshape, node, [value.shape[0] * value.shape[1], value.shape[2]])
        product = self._call(aten.mm, rows, weight)
        if product is None or value.ndim == 2:
            return product
        self.floats.remove(product)
        shape = [*value.shape[:2], product.meta["val"].shape[1]]
        if self.dice.random() < 0.1:
            self.dice.shuffle(shape)
        return self._call(aten.reshape, product, shape)

    def _wait_for_one(self) -> None:
        if self.started:
            self._wait(self.dice.choice(self.started))

    def _wait(self, launch: fx.Node) -> None:
        self.started.remove(launch)
        wait = self._call(WAIT, launch)
        if wait is not None and "custom" in launch.meta:
            self.communicated.append(wait)

    def _return(self) -> None:
        """Return most of what nobody reads, some values besides, and now and then one twice.

        The rest of what nobody reads is dead, or writes to what is read.
        """
        results = list(self.results)
        for node in self.floats:
            chance = 0.1 if node.users or node.op == "placeholder" else 0.85
            if self.dice.random() < chance:
                results.append(node)
        if not results:
            results = self.floats[-1:]
        if self.dice.random() < 0.2:
            results.append(self.dice.choice(results))
        self.graph.output(tuple(results))


def _can_broadcast(node: fx.Node, other: fx.Node) -> bool:
    try:
        torch.broadcast_shapes(node.meta["val"].shape, other.meta["val"].shape)
    except RuntimeError:
        return False
    return True


def _has_elements_twice(value: Tensor) -> bool:
    """Return whether elements of an expanded tensor are one."""
    return any(
        size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )


def _zeros_like(value: Tensor) -> Tensor:
    size, stride = value.shape, value.stride()
    return torch.empty_strided(size, stride, dtype=value.dtype).zero_()


def _value(operand: Any) -> Any:
    return operand.meta["val"] if isinstance(operand, fx.Node) else operand


def mesh_of_ranks(ranks: int) -> str:
    """Return the mesh of generated graphs: two dimensions if each has two ranks or more, else one.

    >>> mesh_of_ranks(2), mesh_of_ranks(8)
    ('dp=2', 'dp=4, tp=2')
    """
    if ranks < 4 or ranks % 2:
        return f"dp={ranks}"
    return f"dp={ranks // 2}, tp=2"


def _groups_of_world() -> list[tuple[str, int]]:
    """Return name and size of the groups of this rank that have others, in the order of names.

    Of groups with the same ranks it is the first: a pass may make others, and a seed has to make
    the same graph after it.
    """
    found = {}
    for name in sorted(names_of_live_groups().values(), key=lambda name: (len(name), name)):
        ranks = tuple(group_ranks(name))
        if len(ranks) > 1 and ranks not in found:
            found[ranks] = name, len(ranks)
    return list(found.values())
