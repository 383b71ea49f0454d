"""Say whether ranks that run these graphs wait for each other for ever, without running them."""

import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, fx

from pytest_gtrainer import facts
from pytest_gtrainer._torch.passes import WAITS
from pytest_gtrainer._torch.process_groups import (
    boxed_reduction,
    group_ranks,
    names_of_live_groups,
)
from pytest_gtrainer._torch.values import HigherOrderOperator, OpOverload, schema
from pytest_gtrainer.attack.queues import (
    RECEIVE,
    SEND,
    Launch,
    Mismatch,
    Operation,
    Queues,
    Schedule,
    Wait,
    orders_by_luck,
    rings_of_luck,
)
from pytest_gtrainer.facts import counted, spell_some
from pytest_gtrainer.graph.collectives import (
    communicates_unseen,
    group_of,
    kind_of,
    launches,
    ranks_given,
    reduction_of,
    unseen,
)
from pytest_gtrainer.graph.foreign import AnyGraph, adopt
from pytest_gtrainer.graph.nodes import (
    argument_of,
    bodies_of,
    graphs_called,
    is_view,
    leaves_of,
    node_fqn,
    short_name,
)
from pytest_gtrainer.graph.same_on_ranks import dtype_text, nodes_within, value_text

Groups = Mapping[str, Sequence[Sequence[int]]]
_FUNCTIONAL = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_EVEN = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce_",
    "gather_",
    "scatter_",
)
"""Collectives whose payloads have one size on all ranks."""
# Of these a rank has a part and a whole, or a list with a tensor for each rank.
_GATHERS = (
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "all_gather_into_tensor_out",
)
_SCATTERS = (
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "reduce_scatter_tensor_out",
)
_IN_LISTS = ("allgather_", "gather_", "reduce_scatter_", "scatter_")
_CALL_ONCE = ("invoke_subgraph", "tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint")
"""Higher-order operators that run their graph once, where they are called."""


@dataclass(frozen=True)
class Send:
    """A node that sends to another rank, counted in the world."""

    to: int


@dataclass(frozen=True)
class Receive:
    """A node that receives from another rank, counted in the world."""

    source: int


@dataclass(frozen=True)
class Collective:
    """A node that all these ranks have to reach, counted in the world; its own rank is one."""

    ranks: Sequence[int]


Communication = Callable[[fx.Node, int], Send | Receive | Collective]
"""Says of a node, on a rank, with whom it communicates."""


class Deadlock(facts.FailedCheck):
    """Ranks wait for each other, or call different collectives."""

    __module__ = "pytest_gtrainer"


class OrderByLuck(UserWarning):
    """Ranks start communications of two groups in opposite order, and nothing decides it."""

    __module__ = "pytest_gtrainer"


@facts.check
def assert_no_deadlock(
    graphs: AnyGraph | Mapping[int, Any],
    *,
    groups: Groups | None = None,
    communications: Mapping[str, Communication] | None = None,
) -> tuple[str, ...]:
    """Fail if the ranks that run these graphs would wait for ever.

    Collectives and messages are put into the queues of their communicators, as NCCL does, in the
    order of each graph; waits are where the graph waits. No value is computed, so the ranks may be
    many. Sends and receives of a pair share one communicator, those of ``batch_p2p_ops`` run
    together in that of their group.

        assert_no_deadlock({rank: graph_of(rank) for rank in range(8)}, groups={"pp": [[0, 1]]})

    Args:
        graphs: by rank, a graph or a sequence of graphs that run one after the other; or one graph
            that every rank of the present world runs.
        groups: the ranks of process groups by name: ``{"fsdp": [[0, 1], [2, 3]]}``. A group of this
            process that holds all ranks is known.
        communications: operators that communicate besides torch's, such as ``{"mine::send":
            lambda node, rank: Send(to=rank + 1)}``. They block.

    Returns:
        What only luck keeps in order, in words. Each is a warning, too, ``OrderByLuck``.

    Raises:
        Deadlock: the cycle of ranks, each with the node and module where it waits; or two ranks
            that call different collectives, or exchange what does not fit.
        ValueError: no graph communicates, or a node does that calls no operator; a group is
            unknown, no graph uses one of ``groups``, or there is no world.
    """
    __tracebackhide__ = True
    by_rank = _by_rank(graphs)
    for name, given in (("groups", groups), ("communications", communications)):
        facts.check_type(given or {}, Mapping, f"{name}=", "a mapping, by name")
    reader = _Reader(groups or {}, communications or {}, sorted(by_rank))
    schedules = {rank: reader.schedule(rank, own) for rank, own in by_rank.items()}
    unused = set(communications or {}) - reader.used
    if unused:
        raise ValueError(
            f"no graph calls {', '.join(sorted(unused))}: communications= takes names of operators "
            'without an overload, such as "mine::send"'
        )

    if not any(schedules.values()):
        raise ValueError(
            "no graph communicates, so no rank could wait: name operators of your own in "
            "communications="
        )

    idle = set(groups or {}) - reader.groups
    if idle:
        # Else a name that is misspelt would leave the ranks to the groups of this process.
        raise ValueError(
            f"no graph communicates in {', '.join(sorted(map(repr, idle)))} of groups=; the groups "
            f"of these graphs are {', '.join(sorted(map(repr, reader.groups))) or 'none'}"
        )

    try:
        stuck = Queues(schedules).run()
    except Mismatch as error:
        facts.emit("verdict", outcome="deadlock", tensors=len(schedules), what="schedule")
        raise Deadlock(str(error)) from None

    outcome = "deadlock" if stuck else "no deadlock"
    facts.emit("verdict", outcome=outcome, tensors=len(schedules), what="schedule")
    if stuck:
        raise Deadlock(f"ranks wait for each other\n{stuck}")

    lucky = find_luck(schedules)
    for line in lucky:
        warnings.warn(line, OrderByLuck, stacklevel=2)
    return lucky


class Calls(NamedTuple):
    """The calls of a rank in a graph.

    Attributes:
        schedule: its launches and waits.
        messages: of each message the other rank, tag, dtype and shape, in words, and its node.
    """

    schedule: Schedule
    messages: Sequence[tuple[str, str]]


def calls_of(gm: fx.GraphModule) -> Calls:
    """Return what the rank of this process calls in a graph, whose groups are those of the process.

    Raises:
        ValueError: there is no such group, or a message has no other rank.
    """
    rank, groups, messages = dist.get_rank(), {}, []
    for node in nodes_within(gm):
        name = group_of(node) if launches(node.target) else None
        if name is None:
            continue
        groups[name] = [group_ranks(name)]
        for end, tag, value in _ends(node, group_ranks(name)):
            words = f"{_message(end, rank)} of tag {tag}, {value_text(value)}"
            messages.append((words, _where(node)))

    return Calls(_Reader(groups, {}, [rank]).schedule(rank, [gm]), messages)


def find_waits(schedules: Mapping[int, Schedule]) -> str:
    """Return how the ranks of these schedules wait for ever, in words; "" if they do not."""
    try:
        return Queues(schedules).run()
    except Mismatch as error:
        return str(error)


def find_luck(schedules: Mapping[int, Schedule]) -> tuple[str, ...]:
    """Return the orders of several communicators that only luck keeps, in words."""
    # A pair is a ring of two, and says it in fewer words.
    return tuple(orders_by_luck(schedules)) or tuple(rings_of_luck(schedules))


def _by_rank(graphs: AnyGraph | Mapping[int, Any]) -> dict[int, list[fx.GraphModule]]:
    """Return the graphs of each rank, in the order in which it runs them."""
    if not isinstance(graphs, Mapping):
        if isinstance(graphs, list | tuple):
            raise ValueError(
                "which rank runs which of these graphs? Give {rank: graph}, or {rank: [graph, ...]}"
            )

        if not dist.is_initialized():
            raise ValueError(
                "one graph for all ranks needs a world: mark the test gt_world, or give a graph "
                "for each rank, {0: graph, 1: graph}"
            )

        graphs = dict.fromkeys(range(dist.get_world_size()), graphs)

    found = {}
    for rank, given in graphs.items():
        own = given
        if not isinstance(given, list | tuple):
            own = [given]
        found[rank] = [adopt(graph) for graph in own]

    return found


class _Reader:
    """Reads schedules from graphs."""

    def __init__(
        self, groups: Groups, communications: Mapping[str, Communication], ranks: Sequence[int]
    ) -> None:
        self._groups, self._communications, self._ranks = groups, communications, ranks
        self.used: set[str] = set()  # names of communications
        self.groups: set[str] = set()  # names of groups that graphs use

    def schedule(self, rank: int, graphs: Sequence[fx.GraphModule]) -> Schedule:
        """Return the launches and waits of a rank, in the order of its graphs."""
        steps: list[Launch | Wait] = []
        # Launches that a graph returns before they are complete, by the name of the result: a later
        # graph may wait for them.
        self._handed: dict[str, int] = {}
        for gm in graphs:
            self._started: dict[fx.Node, int] = {}
            self._returned: dict[fx.Node, list[int | None]] = {}
            for placeholder in gm.graph.find_nodes(op="placeholder"):
                for name in (placeholder.name, placeholder.target):
                    if name in self._handed:
                        self._started[placeholder] = self._handed[name]

            for node in gm.graph.nodes:
                self._read(node, rank, steps)

            for result in leaves_of(gm.graph.output_node().args[0]):
                launch = self._known_launch(result) if isinstance(result, fx.Node) else None
                if launch is not None:
                    self._handed[result.name] = launch

        return steps

    def _read(self, node: fx.Node, rank: int, steps: list[Launch | Wait]) -> None:
        """Add what a node launches and waits for to ``steps``."""
        if self._communicates_inside(node):
            self._read_body(node, rank, steps)
            return

        own = self._declared(node, rank)
        if own is not None:
            steps += [own, Wait(len(steps))]
        elif node.target in WAITS:
            for waited in node.all_input_nodes:
                launch = self._launch_of(waited, steps)
                if launch is not None:
                    steps.append(Wait(launch))
        elif launches(node.target):
            self._started[node] = len(steps)
            steps.append(self._launch(node, rank))
            # Only functional collectives return before they are complete.
            if not is_functional(node):
                steps.append(Wait(len(steps) - 1))
        elif communicates_unseen(node):
            raise unseen(node)

    def _communicates_inside(self, node: fx.Node) -> bool:
        """Return whether a graph that a node calls communicates or waits.

        Raises:
            ValueError: an operator that it is given to call does.
        """
        if isinstance(node.target, HigherOrderOperator):
            for given in node.args:
                if isinstance(given, OpOverload) and self._is_step(given):
                    raise ValueError(
                        f"{node.name} calls {given} inside, in an order that this graph does not "
                        "show: put it into the graph that is judged"
                    )

        for gm in graphs_called(node.graph.owning_module, node):
            if any(self._is_step(inner.target) for inner in nodes_within(gm)):
                return True

        return False

    def _is_step(self, target: Any) -> bool:
        is_own = isinstance(target, OpOverload) and schema(target).name in self._communications
        return launches(target) or target in WAITS or is_own

    def _read_body(self, node: fx.Node, rank: int, steps: list[Launch | Wait]) -> None:
        """Read the graph that a node calls, once, in the node's place.

        Raises:
            ValueError: nobody knows which of its graphs runs, or how often.
        """
        body, *others = graphs_called(node.graph.owning_module, node)
        is_called_once = node.op == "call_module" or short_name(node) in _CALL_ONCE
        if others or not is_called_once:
            raise ValueError(
                f"{node.name} ({short_name(node)}) communicates inside, and no graph shows which "
                "branch runs, or how often: put what runs into the graph that is judged"
            )

        held = bodies_of(node.graph.owning_module, node)
        given = [each for each in leaves_of(node.args) if isinstance(each, fx.Node)]
        given = [operand for operand in given if operand not in held]
        inputs = body.graph.find_nodes(op="placeholder")
        # Numbers among the operands stand before tensors; a launch is never a number.
        for placeholder, operand in zip(reversed(inputs), reversed(given), strict=False):
            launch = self._known_launch(operand)
            if launch is not None:
                self._started[placeholder] = launch

        for inner in body.graph.nodes:
            self._read(inner, rank, steps)

        results = leaves_of(body.graph.output_node().args[0])
        launched = []
        for result in results:
            launch = None
            if isinstance(result, fx.Node):
                launch = self._known_launch(result)
            launched.append(launch)

        self._returned[node] = launched

    def _launch_of(self, node: fx.Node, steps: Sequence[Launch | Wait]) -> int | None:
        """Return the place of the launch that a wait of this value waits for; None for an input.

        Raises:
            ValueError: nobody knows it.
        """
        launch = self._known_launch(node)
        source = node
        while self._is_traced(source):
            source = source.all_input_nodes[0]
        if launch is None and source.op == "placeholder":
            for name, earlier in self._handed.items():
                if Wait(earlier) not in steps:
                    raise ValueError(
                        f"a graph waits for its input {source.name}, and one before it returns "
                        f"{name}, for which nobody has waited: give the input the name of the "
                        "result that it is, or the graphs of the rank as one"
                    )

        # A value that no communication makes is there at once, as an input is.
        is_computed = not self._is_traced(node) and node.op != "placeholder"
        if node.target in WAITS:
            return None  # make_fx records a wait of what funcol.wait_tensor has waited for already
        if launch is None and is_computed and any(map(self._may_start, node.all_input_nodes)):
            raise ValueError(
                f"{node.name} is waited for, and nobody knows which communication makes it"
            )

        return launch

    def _is_traced(self, node: fx.Node) -> bool:
        """Return whether a value is that of another node: an item, or a view."""
        return node.target is operator.getitem or is_view(node.target)

    def _known_launch(self, node: fx.Node) -> int | None:
        """Return the place of the launch whose result a value is; None if it is of none."""
        made, item = node, 0
        while made not in self._started:
            if made in self._returned:
                return self._returned[made][item]
            if not self._is_traced(made):
                return None
            if made.target is operator.getitem and isinstance(made.args[1], int):
                item = made.args[1]

            made = made.all_input_nodes[0]

        return self._started[made]

    def _may_start(self, node: fx.Node) -> bool:
        return node in self._started or any(
            launch is not None for launch in self._returned.get(node, ())
        )

    def _declared(self, node: fx.Node, rank: int) -> Launch | None:
        """Return the launch of an operator whose communication the user has declared."""
        if not isinstance(node.target, OpOverload):
            return None

        name = schema(node.target).name
        communication = self._communications.get(name)
        if communication is None:
            return None

        self.used.add(name)
        given = communication(node, rank)
        if isinstance(given, Collective):
            ranks = tuple(sorted(given.ranks))
            if rank not in ranks:
                raise ValueError(f"rank {rank} is none of the ranks of its {name}: {list(ranks)}")

            operation = Operation(short_name(node), ranks)
            return Launch((operation,), f"{name} {ranks}", _where(node))

        message = _message(given, rank)
        return Launch((message,), _pair(message, name.partition("::")[0]), _where(node))

    def _launch(self, node: fx.Node, rank: int) -> Launch:
        name = short_name(node)
        ranks = self._ranks_of(node, rank)
        group = f"{group_of(node)} {list(ranks)}"
        messages = []
        for end, tag, value in _ends(node, ranks):
            messages.append(_message(end, rank, tag, value))

        if messages:
            queue = group
            if name != "batch_p2p_ops":
                queue = _pair(messages[0], group)
            return Launch(tuple(messages), queue, _where(node))

        _check_group(node, len(ranks))
        sent, received = _splits(node, len(ranks))
        operation = Operation(kind_of(node) or name, ranks, _payload(node), sent, received)
        return Launch((operation,), group, _where(node))

    def _ranks_of(self, node: fx.Node, rank: int) -> tuple[int, ...]:
        """Return the group of a rank for a collective.

        Raises:
            ValueError: nobody knows its ranks.
        """
        given = ranks_given(node)
        if given is not None:
            return given

        name = group_of(node)
        self.groups.add(name or "")
        partition = self._groups.get(name or "")
        if partition is None and name is not None and name in names_of_live_groups().values():
            everyone = group_ranks(name)
            if len(everyone) == dist.get_world_size():
                partition = [everyone]

        if partition is None:
            raise ValueError(
                f"nobody knows the ranks of group {name!r} ({node.name}): say them, "
                f"groups={{{name!r}: [[0, 1], ...]}}"
            )

        listed = [each for ranks in partition if isinstance(ranks, Sequence) for each in ranks]
        if len(set(listed)) < len(listed):
            raise ValueError(f"groups={{{name!r}: {partition}}}: a rank is there twice")

        for ranks in partition:
            if not isinstance(ranks, list | tuple | range):
                raise ValueError(
                    f"groups={{{name!r}: {partition}}}: give the ranks of every group of that "
                    "name, [[0, 1], ...]"
                )

            if rank in ranks:
                return tuple(ranks)

        raise ValueError(f"rank {rank} is in no group of {name!r}: {partition}")


def is_functional(node: fx.Node) -> bool:
    """Return whether an operator returns a value that has to be waited for."""
    return isinstance(node.target, OpOverload) and node.target.namespace in _FUNCTIONAL


def _end(kind: str, peer: int, ranks: Sequence[int], node: fx.Node) -> Send | Receive:
    """Return the end of a message; its other rank is counted in the group.

    Raises:
        ValueError: the group has no such rank, or the node neither sends nor receives.
    """
    if not 0 <= peer < len(ranks):
        raise ValueError(
            f"{node.name} names rank {peer} of a group of {len(ranks)}: ranks of messages are "
            "counted in their group"
        )
    if kind in ("isend", "send"):
        return Send(ranks[peer])
    if kind in ("irecv", "recv_"):
        return Receive(ranks[peer])
    raise ValueError(f"{node.name} has the operation {kind!r}: a message is an isend or an irecv")


def _ends(node: fx.Node, ranks: Sequence[int]) -> list[tuple[Send | Receive, int, Any]]:
    """Return what a node sends and receives: the other rank, the tag, and the value that the graph
    has of what is carried. Collectives have none.

    Raises:
        ValueError: the lists of a batch have other lengths.
    """
    kind = short_name(node)
    if kind == "batch_p2p_ops":
        names = ("op_list", "peer_list", "tag_list", "tensors")
        given = [argument_of(node, name) for name in names]
    elif kind in ("isend", "irecv", "send", "recv_"):
        peer = argument_of(node, "dst" if "send" in kind else "src")
        given = [[kind], [peer], [argument_of(node, "tag")], leaves_of(node.args[:1])]
    else:
        return []

    lengths = [len(each) for each in given]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"{node.name} has lists of {spell_some(list(map(str, lengths)), 4)} elements: each "
            "message has an operation, another rank, a tag and a tensor"
        )
    found = []
    for each, peer, tag, carried in zip(*given, strict=True):
        found.append((_end(each, peer, ranks, node), tag, carried.meta.get("val")))
    return found


def _message(end: Any, rank: int, tag: int | None = None, value: Any = None) -> Operation:
    payload = ""
    # NCCL takes any shape of as many elements.
    if isinstance(value, Tensor) and type(value.numel()) is int:
        payload = f"tag {tag} {dtype_text(value)}[{value.numel()}]"
    if isinstance(end, Send) and end.to != rank:
        return Operation(SEND, (rank, end.to), payload)
    if isinstance(end, Receive) and end.source != rank:
        return Operation(RECEIVE, (end.source, rank), payload)
    if isinstance(end, Send | Receive):
        raise ValueError(f"rank {rank} has a message with itself: {end}")

    raise ValueError(f"a communication is Send, Receive or Collective; not {end!r}")


def _pair(message: Operation, group: str) -> str:
    """Return the queue of messages between two ranks in a group, in both directions."""
    return f"messages of {sorted(message.ranks)} in {group}"


def _payload(node: fx.Node) -> str:
    """Return what has to be equal on all ranks: dtype and reduction, root, and size where it is."""
    parts = []
    reduction = reduction_of(node)
    if reduction is None:
        owner = node.graph.owning_module
        reduction = boxed_reduction(argument_of(node, "reduce_op"), owner)
    if reduction is not None:
        parts.append(reduction)

    root = _root(node)
    if root is not None:
        parts.append(f"root {root}")

    # The first argument is what is sent, or a list of it; of a scatter, what each rank receives.
    sent = node.args[:1]
    if short_name(node) == "gather_":
        sent = [argument_of(node, "input_tensors")]  # its first argument is for the root alone
    for operand in leaves_of(sent):
        if not isinstance(operand, fx.Node):
            continue
        value = operand.meta.get("val")
        if isinstance(value, Tensor):
            size = ""
            if (kind_of(node) or short_name(node)) in _EVEN:
                size = f"[{value.numel()}]"
            parts.append(f"{dtype_text(value)}{size}")

    return " ".join(parts)


def _root(node: fx.Node) -> Any:
    return argument_of(node, "src", "root", "dst", "root_rank")


def _check_group(node: fx.Node, count: int) -> None:
    """Check that a collective is one of as many ranks as its group has.

    Args:
        count: the ranks of the group.

    Raises:
        ValueError: its root, its ``group_size`` or the size of its result is of another group.
    """
    root, size = _root(node), argument_of(node, "group_size")
    # The older operators have ranks in place of a group: those of all groups, and a root of them.
    is_older = ranks_given(node) is not None
    if type(root) is int and not 0 <= root < count and not is_older:
        raise ValueError(
            f"{node.name} has the root {root} in a group of {count} ranks: roots are counted in "
            "their group"
        )
    if type(size) is int and size != count and not is_older:
        raise ValueError(f"{node.name} has group_size {size}, and its group has {count} ranks")

    given = argument_of(node, "input_tensor", "input_tensors", "inputs", "input")
    made = argument_of(node, "output_tensor", "output_tensors", "outputs", "out")
    name = short_name(node)
    if name in _IN_LISTS:
        _check_lists(node, made if name in ("allgather_", "gather_") else given, count)
    elif name in _GATHERS:
        _check_sizes(node, given, made, count)
    elif name in _SCATTERS:
        _check_sizes(node, made, given, count)
    elif name.startswith("reduce_scatter_tensor"):
        for operand in leaves_of(given):
            value = operand.meta.get("val")
            if not isinstance(value, Tensor) or type(size) is not int:
                continue
            rows = value.shape[0] if value.ndim else 1
            if type(rows) is int and rows % size:
                raise ValueError(
                    f"{node.name} has {counted(rows, 'row')} of all ranks, and {size} ranks get as "
                    "many each"
                )


def _check_lists(node: fx.Node, lists: Any, count: int) -> None:
    """Check that a list has a tensor for each rank; off the root one may be empty."""
    right = (0, count) if short_name(node) in ("gather_", "scatter_") else (count,)
    for each in lists:
        if len(each) not in right:
            raise ValueError(
                f"{node.name} has a list of {counted(len(each), 'tensor')}, and its group has "
                f"{count} ranks"
            )


def _check_sizes(node: fx.Node, parts: Any, wholes: Any, count: int) -> None:
    """Check that each whole has the elements of as many parts as the group has ranks."""
    of_one, of_all = leaves_of(parts), leaves_of(wholes)
    if len(of_one) != len(of_all):
        raise ValueError(
            f"{node.name} has {counted(len(of_one), 'tensor')} of each rank, and "
            f"{len(of_all)} of all ranks"
        )
    for part, whole in zip(map(_numel, of_one), map(_numel, of_all), strict=True):
        if part is not None and whole is not None and part * count != whole:
            raise ValueError(
                f"{node.name} has {whole} elements of all ranks and {part} of each, and its group "
                f"has {count} ranks"
            )


Splits = tuple[int | None, ...]


def _splits(node: fx.Node, count: int) -> tuple[Splits, Splits]:
    """Return the elements that an all-to-all sends to each rank of its group, and those it expects.

    None stands for a number that the graph does not show, as it comes from a tensor; both are empty
    for other collectives.

    Args:
        count: the ranks of the group.

    Raises:
        ValueError: there are more or fewer splits than ranks.
    """
    if kind_of(node) != "all_to_all":
        return (), ()

    inputs, outputs = argument_of(node, "input_tensors"), argument_of(node, "output_tensors")
    if inputs is not None:  # c10d.alltoall_ takes a tensor for each rank
        sent, received = tuple(map(_numel, inputs)), tuple(map(_numel, outputs))
    else:
        source = argument_of(node, "input")
        # A functional one returns its output, whose rows are those of the input.
        target = argument_of(node, "output") or source
        sent = _in_elements(argument_of(node, "input_split_sizes"), source, count)
        received = _in_elements(argument_of(node, "output_split_sizes"), target, count)

    for splits in (sent, received):
        if len(splits) != count:
            raise ValueError(f"{node.name} has {len(splits)} splits for a group of {count} ranks")

    return sent, received


def _numel(node: fx.Node) -> int | None:
    """Return the number of elements of a value; None if it is not known."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or type(value.numel()) is not int:
        return None
    return value.numel()


def _in_elements(splits: Any, tensor: fx.Node, count: int) -> Splits:
    """Return splits of a tensor's rows in elements; without splits they are even."""
    if isinstance(splits, fx.Node):
        return (None,) * count
    if not splits:
        numel = _numel(tensor)
        if numel is None or numel % count:
            return (None,) * count
        return (numel // count,) * count

    value = tensor.meta.get("val")
    row = None
    if isinstance(value, Tensor):
        row = math.prod(value.shape[1:])
    found: list[int | None] = []
    for split in splits:
        # A node stands for a number that the run computes, a SymInt for any number.
        if type(split) is int and type(row) is int:
            found.append(split * row)
        else:
            found.append(None)

    return tuple(found)


def _where(node: fx.Node) -> str:
    module = node_fqn(node)
    if module:
        return f"{node.name} of {module}"
    return node.name
