"""Bucket plans: which modules' parameters travel in one collective.

A plan is a list of entries; an entry is a module FQN, or a list of FQNs that share a bucket.
The innermost matching FQN decides, so ``layers.1.moe.routed_experts`` may be a bucket of its
own beside the rest of ``layers.1``. The root's FQN is "": an entry for what no other has.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pytest_gtrainer.facts import check_switches
from pytest_gtrainer.graph.collectives import FsdpCollective, PlanError

PlanEntry = str | list[str]
BucketPlan = Sequence[PlanEntry]

LOSS = "loss"
SUGGESTS = "python -m pytest_gtrainer plan MODULE:FACTORY suggests a plan"
_DENSE_PARTS = ("attention_norm", "attention", "ffn_norm", "moe.router", "moe.shared_experts")
_ROUTED_EXPERTS = "moe.routed_experts"


def get_default_transformer_block_buckets(
    n_layers: int,
    *,
    chunked_loss_enabled: bool = False,
    moe_layers: Collection[int] = (),
    expert_fsdp_degree: int = 1,
) -> list[PlanEntry]:
    """Return the plan of torchtitan's models: embedding, ``n_layers`` blocks, norm and head.

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
    check_switches(chunked_loss_enabled=chunked_loss_enabled)
    if type(n_layers) is not int or n_layers < 1:
        raise ValueError(f"n_layers={n_layers}: a model has at least one layer")
    if unknown := set(moe_layers).difference(range(n_layers)):
        raise ValueError(
            f"moe_layers names {sorted(unknown)}, the model has layers 0..{n_layers - 1}"
        )
    if type(expert_fsdp_degree) is not int or expert_fsdp_degree < 1:
        raise ValueError(
            f"expert_fsdp_degree={expert_fsdp_degree!r}: give a number of ranks, 1 or more"
        )

    plan: list[PlanEntry] = ["tok_embeddings"]
    for layer in range(n_layers):
        if layer in moe_layers and expert_fsdp_degree > 1:
            plan.append([f"layers.{layer}.{part}" for part in _DENSE_PARTS])
            plan.append(f"layers.{layer}.{_ROUTED_EXPERTS}")
        else:
            plan.append(f"layers.{layer}")

    last = ["norm", "lm_head"]
    if chunked_loss_enabled:
        last.append(LOSS)
    plan.append(last)
    return plan


def expert_fsdp_degree(
    *,
    mesh: Mapping[str, int] | None = None,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
) -> int:
    """Return the number of ranks that a routed expert is sharded over, at least 1.

    That is ``efsdp`` of the mesh; without a mesh ``dp_shard * cp * tp // ep``.
    """
    if ep < 1:
        raise ValueError(f"ep={ep}: experts are on one rank at least")
    if mesh is not None:
        return max(1, mesh.get("efsdp", 1))
    return max(1, dp_shard * cp * tp // ep)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One entry of a plan.

    Attributes:
        fqns: the modules of the entry.
        roots: the modules that eager FSDP2 wraps for it. That decides the order of the payload, and
            the association of gradient sums, as FSDP2 hands a wrapped module's inputs on by a
            function. A list that is all of a layer except for modules with buckets of their own
            (routed experts) has the layer as its root, because trainers wrap it so:
            ``fully_shard(experts)``, then ``fully_shard(block)``.
    """

    fqns: tuple[str, ...]
    roots: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Return the name of the bucket in messages.

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

        lists: list[tuple[str, ...]] = []
        for index, entry in enumerate(entries):
            fqns = tuple(entry) if isinstance(entry, list | tuple) else (entry,)
            if not fqns:
                raise PlanError(f"entry {index} of the bucket plan is empty")
            for fqn in fqns:
                if not isinstance(fqn, str):
                    raise PlanError(
                        f"entry {index} of the bucket plan has {fqn!r}: "
                        "expected FQNs, or lists of FQNs"
                    )
            lists.append(fqns)

        # Trainers wrap a layer as a whole, unless its modules are in several lists.
        wrapped = Counter(layer_of(fqns[0]) for fqns in lists if len(fqns) > 1)
        buckets = []
        self._by_fqn: dict[str, Bucket] = {}
        for fqns in lists:
            layer = layer_of(fqns[0])
            is_wrapped = len(fqns) > 1 and wrapped[layer] == 1
            roots = fqns
            if layer is not None and is_wrapped:
                roots = (layer,)
            bucket = Bucket(fqns, roots)
            buckets.append(bucket)
            homes = sorted({layer_of(fqn) or "no layer" for fqn in fqns})
            if len(homes) > 1:
                raise PlanError(
                    f"bucket {bucket.label!r} spans {' and '.join(homes)}: "
                    "one bucket stays within one layer"
                )

            for fqn in fqns:
                if fqn in self._by_fqn:
                    raise PlanError(f"the bucket plan names {fqn!r} twice")
                self._by_fqn[fqn] = bucket

        self.buckets = tuple(buckets)

    def bucket_of(self, fqn: str) -> Bucket | None:
        """Return the bucket of the innermost entry at or above ``fqn``, or None."""
        while fqn:
            if fqn in self._by_fqn:
                return self._by_fqn[fqn]
            fqn = fqn.rpartition(".")[0]
        return self._by_fqn.get("")

    def check_ties(self, tied: Mapping[str, Sequence[str]]) -> None:
        """Raise PlanError if one of ``tied_parameters`` is in several buckets."""
        for names in tied.values():
            modules = [name.rpartition(".")[0] for name in names]
            labels = set()
            for module in modules:
                bucket = self.bucket_of(module)
                # The root's group has what no entry covers.
                labels.add(bucket.label if bucket else "the root")
            if len(labels) > 1:
                others = ", ".join(repr(name) for name in names[1:])
                raise PlanError(
                    f"Parameter {names[0]!r} is shared with {others} in another bucket "
                    f"({', '.join(sorted(labels))}): FSDP2 manages a shared/tied parameter in one "
                    f"group, so place its modules in the same bucket, {modules!r}; {SUGGESTS}"
                )

    def check_names(self, known: Iterable[str]) -> None:
        """Raise PlanError for entries that are no module of the graph; ``known`` are its FQNs."""
        prefixes = {LOSS, ""}
        for fqn in known:
            while fqn not in prefixes:
                prefixes.add(fqn)
                fqn = fqn.rpartition(".")[0]
        if missing := [fqn for fqn in self._by_fqn if fqn not in prefixes]:
            raise unknown_modules(missing, sorted(prefixes))


def unknown_modules(missing: Sequence[str], known: Collection[str]) -> PlanError:
    """Return the error for ``missing`` entries of a plan; the model's modules are ``known``."""
    hint = ""
    for close in difflib.get_close_matches(missing[0], known, n=1):
        hint = f", did you mean {close!r}?"
    roots = ", ".join(fqn for fqn in known if fqn not in ("", LOSS) and "." not in fqn)
    return PlanError(
        f"the bucket plan names {', '.join(map(repr, missing))}, which the model does not have"
        f"{hint}; its outermost modules are {roots}; list these, or modules inside them, as "
        "bucket_plan; n_layers=N stands for the names of torchtitan's models; "
        f"{SUGGESTS}"
    )


def tied_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of each parameter that several modules hold, by the first of them.

    A module that is registered twice counts as one.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            names.setdefault(parameter, []).append(name)
    return {fqns[0]: tuple(fqns) for fqns in names.values() if len(fqns) > 1}


def layer_of(fqn: str) -> str | None:
    """Return the layer of a module: its FQN up to the first index.

    >>> layer_of("layers.3.experts.0.w1"), layer_of("norm")
    ('layers.3', None)
    """
    parts = fqn.split(".")
    for place, part in enumerate(parts, start=1):
        if part.isdigit():
            return ".".join(parts[:place])
    return None


ORDERS = ("managed", "registration", "execution")
PayloadOrder = str | Sequence[str]
PayloadKey = Callable[[Bucket, FsdpCollective], tuple[int, ...]]


def managed_order(parameter_fqns: Iterable[str], below: str = "") -> list[str]:
    """Return all parameters of a model in FSDP2's order, depth first.

    Args:
        parameter_fqns: their names in ``named_parameters`` order.
        below: the prefix of all these names.

    >>> managed_order(["scale", "w.weight", "w.bias", "norm.weight"])
    ['w.weight', 'w.bias', 'norm.weight', 'scale']
    """
    own: list[str] = []
    children: dict[str, list[str]] = {}
    for fqn in parameter_fqns:
        child, dot, _ = fqn.removeprefix(below).partition(".")
        if dot:
            children.setdefault(child, []).append(fqn)
        else:
            own.append(fqn)

    # ``_get_managed_modules`` of FSDP2 appends a module after its children.
    ordered: list[str] = []
    for child, fqns in children.items():
        ordered += managed_order(fqns, f"{below}{child}.")
    return ordered + own


def managed_order_of(model: nn.Module) -> list[str]:
    """Return the order in which FSDP2 walks over the modules of a model.

    A module that is registered twice counts where the walk comes to it first.
    """
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    seen: set[nn.Module] = set()
    ordered: dict[str, None] = {}

    def walk(module: nn.Module) -> None:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                walk(child)
        for parameter in module.parameters(recurse=False):
            ordered[names[parameter]] = None

    walk(model)
    return list(ordered)


def sort_key(
    order: PayloadOrder,
    parameter_fqns: Sequence[str],
    graph_position: Callable[[FsdpCollective], int],
    managed: Sequence[str] | None = None,
) -> PayloadKey:
    """Return the key that puts the members of a bucket into payload order.

    Args:
        order: "managed" (FSDP2's), "registration", "execution", or a list of FQNs. Members that a
            list leaves out come last, in graph order.
        parameter_fqns: all parameters in registration order.
        managed: FSDP2's order as the tracer wrote it down; by default it is read off the names.

    Raises:
        ValueError: ``order`` is an unknown word.
    """
    if order == "execution":
        return lambda bucket, member: (graph_position(member),)
    fqns = parameter_fqns
    if order == "managed":
        fqns = managed or managed_order(parameter_fqns)
    elif not isinstance(order, str):
        fqns = order
    elif order not in ORDERS:
        raise ValueError(
            f"payload_order={order!r}: expected {', '.join(ORDERS)}, or a list of parameter FQNs"
        )

    rank = {fqn: place for place, fqn in enumerate(fqns)}

    def key(bucket: Bucket, member: FsdpCollective) -> tuple[int, ...]:
        root = 0
        if order == "managed":
            # FSDP2 goes through the roots of a group; what no root holds comes after them.
            for fqn in bucket.roots:
                if not fqn or member.parameter.startswith(f"{fqn}."):
                    break
                root += 1
        return (root, rank.get(member.parameter, len(rank)), graph_position(member))

    return key
