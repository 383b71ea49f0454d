"""Collectives of a graph: which operators they are, and what they give the members of a group.

A *call* is one member's arguments by name, and its rank in the world as ``rank``. Whatever else belongs to
the namespaces of collectives has no model and is refused: data that silently did not move would look
like data (S5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from pytest_gtrainer._torch.operators import OpOverload, schema
from pytest_gtrainer.worlds.simulated import CollectiveMismatch, NoModel, collectives
from pytest_gtrainer.worlds.simulated.interpreter.values import interned
from pytest_gtrainer.worlds.simulated.net import Net

Call = dict[str, Any]
Handler = Callable[[Net, Sequence[Call]], list[Any]]

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem", "_dtensor")
_PASSED_THROUGH = ("wait_tensor", "_wrap_tensor_autograd")
_WRITTEN = {"all_gather_into_tensor_out": "out", "reduce_scatter_tensor_out": "out", "all_reduce_": "input",
            "broadcast_": "input", "all_reduce_coalesced_": "inputs"}  # fmt: skip


def is_collective(node: fx.Node) -> bool:
    """Whether the operator communicates, modelled or not."""
    return isinstance(node.target, OpOverload) and node.target.namespace in NAMESPACES


def passes_through(node: fx.Node) -> bool:
    """Whether a collective's operator gives its argument back: a wait."""
    return is_collective(node) and _name(node) in _PASSED_THROUGH


def is_reduction(node: fx.Node) -> bool:
    """Whether a collective adds what the members give."""
    return is_collective(node) and _name(node).startswith(("reduce_scatter_tensor", "all_reduce"))


def written_argument(node: fx.Node) -> str | None:
    """Name of the argument that an in-place collective writes its result to."""
    return _WRITTEN.get(_name(node))


def handler_of(node: fx.Node) -> Handler:
    """What carries the collective out.

    Raises:
        NoModel: naming the operator.
    """
    handler = _HANDLERS.get(_name(node)) if str(node.target).startswith(("_c10d_functional", "_dtensor")) else None
    if handler is None:
        known = ", ".join(sorted(_HANDLERS))
        raise NoModel(f"{node.target} ({node.name}) has no model in a simulated world, which has {known}")
    return handler


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return str(schema(target).name).rpartition("::")[2]


def _all_gather(net: Net, calls: Sequence[Call]) -> list[Any]:
    _check_group(calls)
    return _shared(collectives.all_gather(_same_tensors(calls)), calls)


def _reduce_scatter(net: Net, calls: Sequence[Call]) -> list[Any]:
    _check_group(calls)
    given = _same_tensors(calls)
    if given[0].shape[0] % len(calls):
        raise CollectiveMismatch(f"{given[0].shape[0]} rows do not divide over {len(calls)} ranks: pad them")
    return collectives.reduce_scatter(net, given, _op(calls))


def _all_reduce(net: Net, calls: Sequence[Call]) -> list[Any]:
    return _shared(collectives.all_reduce(net, _same_tensors(calls), _op(calls)), calls)


def _broadcast(net: Net, calls: Sequence[Call]) -> list[Any]:
    return _shared(_same_tensors(calls)[calls[0]["src"]].clone(), calls)


def _all_to_all(net: Net, calls: Sequence[Call]) -> list[Any]:
    sends = [list(map(int, call["input_split_sizes"])) for call in calls]
    receives = [list(map(int, call["output_split_sizes"])) for call in calls]
    for call, sent, received in zip(calls, sends, receives, strict=True):
        _check_splits(call, sent, received, calls)
    _check_matching(calls, sends, receives)
    return list(collectives.all_to_all([call["input"] for call in calls], sends))


def _exchange_dims(net: Net, calls: Sequence[Call]) -> list[Any]:
    first = calls[0]
    return list(collectives.exchange_dims(_same_tensors(calls), first["gather_dim"], first["shard_dim"]))


def _coalesced(one: Handler) -> Handler:
    """One collective for each tensor of a list."""

    def every(net: Net, calls: Sequence[Call]) -> list[Any]:
        counts = {len(call["inputs"]) for call in calls}
        if len(counts) > 1:
            raise CollectiveMismatch(f"the ranks give lists of {' and '.join(map(str, sorted(counts)))} tensors")
        results = [
            one(net, [{**call, "input": call["inputs"][index]} for call in calls]) for index in range(counts.pop())
        ]
        return interned([list(own) for own in zip(*results, strict=True)] or [[] for _ in calls])

    return every


_HANDLERS: dict[str, Handler] = {
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather,
    "all_gather_into_tensor_coalesced": _coalesced(_all_gather),
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _coalesced(_reduce_scatter),
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce,
    "all_reduce_coalesced": _coalesced(_all_reduce),
    "all_reduce_coalesced_": _coalesced(_all_reduce),
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "broadcast_": _broadcast,
    "shard_dim_alltoall": _exchange_dims,
}


def _shared(result: Tensor, calls: Sequence[Call]) -> list[Any]:
    """One tensor for all members."""
    return [result] * len(calls)


def _op(calls: Sequence[Call]) -> str:
    return str(calls[0]["reduce_op"]).lower()


def _same_tensors(calls: Sequence[Call]) -> list[Tensor]:
    """The inputs, of one shape and dtype, taken out of the calls."""
    given: list[Tensor] = [call.pop("input") for call in calls]
    first = given[0]
    for call, tensor in zip(calls, given, strict=True):
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise CollectiveMismatch(
                f"rank {calls[0]['rank']} gives {_text(first)}, rank {call['rank']} gives {_text(tensor)}"
            )
    return given


def _check_group(calls: Sequence[Call]) -> None:
    if calls[0]["group_size"] != len(calls):
        raise CollectiveMismatch(f"the graph was traced for a group of {calls[0]['group_size']}, it has {len(calls)}")


def _check_splits(call: Call, sent: list[int], received: list[int], calls: Sequence[Call]) -> None:
    """One member's splits fit its tensor, and its tensor's rows those of the others."""
    own, first = call["input"], calls[0]["input"]
    if len(sent) != len(calls) or len(received) != len(calls) or sum(sent) != own.shape[0]:
        raise CollectiveMismatch(
            f"rank {call['rank']} splits {own.shape[0]} rows into {sent} and receives {received}, "
            f"in a group of {len(calls)} ranks"
        )
    if own.shape[1:] != first.shape[1:] or own.dtype != first.dtype:
        raise CollectiveMismatch(
            f"rank {calls[0]['rank']} gives {_text(first)}, rank {call['rank']} gives {_text(own)}"
        )


def _check_matching(calls: Sequence[Call], sends: list[list[int]], receives: list[list[int]]) -> None:
    for source, sent in enumerate(sends):
        for destination, rows in enumerate(sent):
            if receives[destination][source] != rows:
                raise CollectiveMismatch(
                    f"rank {calls[source]['rank']} sends {rows} rows to rank {calls[destination]['rank']}, "
                    f"which expects {receives[destination][source]}"
                )


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def written_result(targets: Any, result: Any) -> Any:
    """Copy a result, tensor or list of them, into what an in-place collective writes to; give that back."""
    if isinstance(targets, Tensor):
        return targets.copy_(result)
    return [target.copy_(value) for target, value in zip(targets, result, strict=True)]
