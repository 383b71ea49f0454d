"""Bucket plans: which modules' parameters travel in one collective.

A plan is a list of entries; an entry is a module FQN, or a list of FQNs that share a bucket.
The innermost matching FQN decides, so ``layers.1.moe.routed_experts`` may be a bucket of its
own beside the rest of ``layers.1``. The root's FQN is "": an entry for what no other has.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pytest_gtrainer.graph.collectives import FsdpCollective, PlanError

PlanEntry = str | list[str]
BucketPlan = Sequence[PlanEntry]

LOSS = "loss"
_DENSE_PARTS = ("attention_norm", "attention", "ffn_norm", "moe.router", "moe.shared_experts")
_ROUTED_EXPERTS = "moe.routed_experts"


def get_default_transformer_block_buckets(
    n_layers: int,
    *,
    chunked_loss_enabled: bool = False,
    moe_layers: Collection[int] = (),
    expert_fsdp_degree: int = 1,
) -> list[PlanEntry]:
    """Return the plan of torchtitan's models: the embedding, one bucket for each of ``n_layers``
    blocks, norm and head.

    Args:
        chunked_loss_enabled: chunked cross entropy runs the head inside the loss, so "loss" joins
            the last bucket.
        moe_layers: layers with a mixture of experts.
        expert_fsdp_degree: ranks a routed expert is sharded over; above 1, routed experts have a
            bucket of their own.

    Raises:
        ValueError: ``n_layers`` is below 1, or ``moe_layers`` names a layer that does not exist.

    >>> get_default_transformer_block_buckets(2)
    ['tok_embeddings', 'layers.0', 'layers.1', ['norm', 'lm_head']]
    """
    if n_layers < 1:
        raise ValueError(f"n_layers={n_layers}: a model has at least one layer")
    if unknown := sorted(layer for layer in moe_layers if not 0 <= layer < n_layers):
        raise ValueError(f"moe_layers names {unknown}, the model has layers 0..{n_layers - 1}")
    plan: list[PlanEntry] = ["tok_embeddings"]
    for layer in range(n_layers):
        if layer in moe_layers and expert_fsdp_degree > 1:
            plan.append([f"layers.{layer}.{part}" for part in _DENSE_PARTS])
            plan.append(f"layers.{layer}.{_ROUTED_EXPERTS}")
        else:
            plan.append(f"layers.{layer}")
    plan.append(["norm", "lm_head", LOSS] if chunked_loss_enabled else ["norm", "lm_head"])
    return plan


def expert_fsdp_degree(
    *,
    mesh: Mapping[str, int] | None = None,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
) -> int:
    """Ranks a routed expert is sharded over: those of ``efsdp``, else ``dp_shard * cp * tp //
    ep``; at least 1.
    """
    if ep < 1:
        raise ValueError(f"ep={ep}: experts are on one rank at least")
    return max(1, mesh.get("efsdp", 1) if mesh is not None else dp_shard * cp * tp // ep)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One entry of a plan."""

    fqns: tuple[str, ...]
    roots: tuple[str, ...] = ()
    """What eager FSDP2 wraps for it: its FQNs. A list that is all of a layer but some modules with
    buckets of their own (routed experts) is the layer, as trainers wrap it:
    ``fully_shard(experts)``, then ``fully_shard(block)``. That decides the payload's order, and the
    association of gradient sums: FSDP2 hands a wrapped module's inputs on by a function.
    """

    @property
    def label(self) -> str:
        """
        >>> Bucket(("norm", "lm_head")).label
        'norm+lm_head'
        """
        return "+".join(fqn or "the root" for fqn in self.fqns)


class Plan:
    """A checked plan that finds the bucket of a module FQN."""

    def __init__(self, entries: BucketPlan) -> None:
        if isinstance(entries, str):
            raise PlanError(
                f"the bucket plan is the word {entries!r}: give a list of entries, [{entries!r}]"
            )
        fqns_of: list[tuple[str, ...]] = []
        for index, entry in enumerate(entries):
            if not (fqns := tuple(entry) if isinstance(entry, list | tuple) else (entry,)):
                raise PlanError(f"entry {index} of the bucket plan is empty")
            if wrong := [fqn for fqn in fqns if not isinstance(fqn, str)]:
                raise PlanError(
                    f"entry {index} of the bucket plan has {wrong[0]!r}: expected FQNs, or lists of FQNs"
                )
            fqns_of.append(fqns)
        layers = [layer_of(fqns[0]) if len(fqns) > 1 else None for fqns in fqns_of]
        pairs = zip(layers, fqns_of, strict=True)
        roots = [
            (layer,) if layer is not None and layers.count(layer) == 1 else fqns
            for layer, fqns in pairs
        ]
        self.buckets = tuple(map(Bucket, fqns_of, roots))
        self._by_fqn: dict[str, Bucket] = {}
        for bucket in self.buckets:
            if len(homes := sorted({layer_of(fqn) or "no layer" for fqn in bucket.fqns})) > 1:
                raise PlanError(
                    f"bucket {bucket.label!r} spans {' and '.join(homes)}: one bucket stays within one layer"
                )
            for fqn in bucket.fqns:
                if fqn in self._by_fqn:
                    raise PlanError(f"the bucket plan names {fqn!r} twice")
                self._by_fqn[fqn] = bucket

    def bucket_of(self, fqn: str) -> Bucket | None:
        """The bucket of the innermost entry at or above ``fqn``; None if no entry is."""
        while fqn:
            if fqn in self._by_fqn:
                return self._by_fqn[fqn]
            fqn = fqn.rpartition(".")[0]
        return self._by_fqn.get("")

    def check_ties(self, tied: Mapping[str, Sequence[str]]) -> None:
        """Raise PlanError for one of ``tied_parameters`` in several buckets; what no entry covers
        is in the root's.
        """
        for names in tied.values():
            modules = [name.rpartition(".")[0] for name in names]
            buckets = {
                bucket.label if bucket else "the root" for bucket in map(self.bucket_of, modules)
            }
            if len(buckets) > 1:
                raise PlanError(
                    f"Parameter {names[0]!r} is shared with {', '.join(map(repr, names[1:]))} in another bucket "
                    f"({', '.join(sorted(buckets))}): FSDP2 manages a shared/tied parameter in one group, so place "
                    f"its modules in the same bucket, {modules!r}"
                )

    def check_names(self, known: Iterable[str]) -> None:
        """Raise PlanError for entries that are no module of the graph; ``known`` are its FQNs."""
        paths = (fqn.split(".") for fqn in known)
        prefixes = {
            LOSS,
            "",
            *(".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)),
        }
        if missing := [fqn for fqn in self._by_fqn if fqn not in prefixes]:
            raise unknown_modules(missing, sorted(prefixes))


def unknown_modules(missing: Sequence[str], known: Collection[str]) -> PlanError:
    """Return what to raise for entries of a plan that are no module of a model, whose modules are
    ``known``.
    """
    close = difflib.get_close_matches(missing[0], known, n=1)
    told = f"the bucket plan names {', '.join(map(repr, missing))}, which the model does not have"
    roots = ", ".join(fqn for fqn in known if fqn not in ("", LOSS) and "." not in fqn)
    return PlanError(
        f"{told}{f', did you mean {close[0]!r}?' if close else ''}; its outermost modules are {roots}; "
        "list these, or modules inside them, as bucket_plan; n_layers=N stands for the names of torchtitan's models"
    )


def tied_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Names of each parameter that several modules hold, by the first of them; a module registered
    twice is one.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            names.setdefault(parameter, []).append(name)
    return {held[0]: tuple(held) for held in names.values() if len(held) > 1}


def layer_of(fqn: str) -> str | None:
    """The layer a module belongs to: its FQN up to the first index.

    >>> layer_of("layers.3.experts.0.w1"), layer_of("norm")
    ('layers.3', None)
    """
    parts = fqn.split(".")
    numbers = (place for place, part in enumerate(parts, start=1) if part.isdigit())
    return ".".join(parts[:place]) if (place := next(numbers, 0)) else None


ORDERS = ("managed", "registration", "execution")
PayloadOrder = str | Sequence[str]
PayloadKey = Callable[[Bucket, FsdpCollective], tuple[int, ...]]


def managed_order(parameter_fqns: Iterable[str], below: str = "") -> list[str]:
    """All parameters of a model in FSDP2's order, depth first, from their names in
    ``named_parameters`` order.

    >>> managed_order(["scale", "w.weight", "w.bias", "norm.weight"])
    ['w.weight', 'w.bias', 'norm.weight', 'scale']
    """
    own: list[str] = []
    children: dict[str, list[str]] = {}
    for fqn in parameter_fqns:
        child, dot, _ = fqn.removeprefix(below).partition(".")
        (children.setdefault(child, []) if dot else own).append(fqn)
    return [
        *(
            fqn
            for child, fqns in children.items()
            for fqn in managed_order(fqns, f"{below}{child}.")
        ),
        *own,
    ]


def managed_order_of(model: nn.Module) -> list[str]:
    """The same by torch's walk over the modules; one registered twice counts where the walk comes
    to it first.
    """
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[str]:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                yield from walk(child)
        yield from (names[parameter] for parameter in module.parameters(recurse=False))

    return list(dict.fromkeys(walk(model)))


def sort_key(
    order: PayloadOrder,
    parameter_fqns: Sequence[str],
    graph_position: Callable[[FsdpCollective], int],
    managed: Sequence[str] | None = None,
) -> PayloadKey:
    """The key that puts a bucket's members into payload order; a ValueError for an unknown word.
    ``order`` is "managed" (FSDP2's, as the tracer wrote it down, else from the names),
    "registration", "execution", or a list of FQNs; ``parameter_fqns`` are in registration order.
    What it leaves out comes last, in graph order.
    """
    if order == "execution":
        return lambda bucket, member: (graph_position(member),)
    if not isinstance(order, str):
        fqns = list(order)
    elif order not in ORDERS:
        raise ValueError(
            f"payload_order={order!r}: expected {', '.join(ORDERS)}, or a list of parameter FQNs"
        )
    else:
        fqns = (
            list(managed or managed_order(parameter_fqns))
            if order == "managed"
            else list(parameter_fqns)
        )
    rank = {fqn: place for place, fqn in enumerate(fqns)}

    def key(bucket: Bucket, member: FsdpCollective) -> tuple[int, ...]:
        root = 0
        if (
            order == "managed"
        ):  # which of the bucket's roots holds the parameter; behind all of them if none does
            holds = [not fqn or member.parameter.startswith(f"{fqn}.") for fqn in bucket.roots]
            root = [*holds, True].index(True)
        return (root, rank.get(member.parameter, len(rank)), graph_position(member))

    return key
