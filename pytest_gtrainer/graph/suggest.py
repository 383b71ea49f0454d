"""Suggest a bucket plan for a model.

A plan is what a trainer would wrap by ``fully_shard``: each layer by itself, what is registered
before, between and after the layers in a bucket for each such place, and parameters that are tied
together. Only modules and their names are read, so the model may be on the meta device.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from pytest_gtrainer.graph.bucket_plan import Plan, PlanEntry, layer_of, tied_parameters
from pytest_gtrainer.graph.collectives import PlanError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward, which ``fully_shard`` refuses."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A bucket: the modules of an entry, whether they are one layer, and the reason in words."""

    fqns: tuple[str, ...]
    is_layer: bool
    why: str

    @property
    def entry(self) -> PlanEntry:
        """Return the entry of the plan."""
        return self.fqns[0] if len(self.fqns) == 1 else list(self.fqns)


@dataclass(frozen=True, slots=True)
class SuggestedPlan:
    """The buckets of a model, and what else its owner should know."""

    buckets: tuple[Suggestion, ...]
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> list[PlanEntry]:
        """Return the bucket plan."""
        return [bucket.entry for bucket in self.buckets]


def suggest_plan(model: nn.Module, *, split_experts: bool = False) -> SuggestedPlan:
    """Return the buckets of a model, each with its reason.

    Args:
        model: with unsharded parameters, on any device.
        split_experts: give the routed experts of a layer a bucket of their own, as they need where
            they are sharded over another mesh than the rest.

    Raises:
        PlanError: the model has no parameters; or layers share one, which no plan can hold, as
            FSDP2 manages a shared parameter in one group.
    """
    if not _holds_parameters(model):
        raise PlanError(f"{type(model).__name__} has no parameters: there is nothing to bucket")
    layers = _find_layers(model)
    if not layers:
        why = "no module is repeated in a ModuleList or Sequential: one bucket for all parameters"
        return SuggestedPlan((Suggestion(("",), False, why),))

    modules = dict(model.named_modules())
    buckets: list[Suggestion] = []
    together, apart = [], []
    for fqn in _walk(model, layers):
        if fqn in layers:
            stack = fqn.rpartition(".")[0]
            where = f"{stack!r}" if stack else "the model"
            buckets.append(Suggestion((fqn,), True, f"a layer of {where}"))
            experts = _experts_of(fqn, modules[fqn])
            if experts and split_experts:
                why = "its experts, for a mesh of their own (TrainConfig.submeshes)"
                apart.append(Suggestion((experts,), True, why))
            elif experts:
                together.append(experts)
        elif _surrounds(fqn, layers):
            held = ", ".join(name for name, _ in modules[fqn].named_parameters(recurse=False))
            why = f"it holds {held} itself, so what no layer of it holds travels with that"
            buckets.append(Suggestion((fqn,), False, why if fqn else f"the model: {why}"))
        else:
            _add_outside(buckets, fqn)
    buckets = _join_ties(model, [*_say_places(buckets), *apart])
    notes = []
    if together:
        named = ", ".join(together[:2]) + (", ..." if len(together) > 2 else "")
        notes.append(
            f"{named}: experts travel with their layer. Over another mesh (expert parallelism) "
            "they need a bucket of their own: add --experts"
        )
    return SuggestedPlan(tuple(buckets), tuple(notes))


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _holds_directly(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with an index, and those of containers of one class, by FQN."""
    layers: dict[str, nn.Module] = {}
    inside: set[str] = set()
    for fqn, module in model.named_modules():
        parent = fqn.rpartition(".")[0]
        if fqn and parent in inside:
            inside.add(fqn)
            continue
        if not fqn or not _holds_parameters(module):
            continue
        if layer_of(fqn) == fqn or _is_stack(model.get_submodule(parent)):
            layers[fqn] = module
            inside.add(fqn)
    return layers


def _is_stack(module: nn.Module) -> bool:
    """Return whether a container holds two or more modules with parameters, all of one class."""
    if not isinstance(module, (*_CONTAINERS, nn.Sequential)):
        return False
    classes = [type(child) for child in module.children() if _holds_parameters(child)]
    return len(classes) > 1 and len(set(classes)) == 1


def _surrounds(fqn: str, layers: Iterable[str]) -> bool:
    """Return whether a module has layers inside."""
    return not fqn or any(layer.startswith(f"{fqn}.") for layer in layers)


def _walk(model: nn.Module, layers: dict[str, nn.Module]) -> Iterator[str]:
    """Yield layers, and the largest modules around which nothing else is wrapped, in registration
    order.

    A module with parameters of its own, and layers inside, comes after these layers: it is wrapped
    after them, and what else it holds is in its group.
    """
    seen: set[nn.Module] = set()

    def walk(fqn: str, module: nn.Module, is_covered: bool) -> Iterator[str]:
        seen.add(module)
        if fqn in layers:
            yield fqn
            return
        if not _surrounds(fqn, layers) and not isinstance(module, _CONTAINERS):
            if not is_covered:
                yield fqn
            return
        holds = _holds_directly(module)
        for name, child in module.named_children():
            if child not in seen and _holds_parameters(child):
                yield from walk(f"{fqn}.{name}".lstrip("."), child, is_covered or holds)
        if holds and not is_covered:
            yield fqn

    yield from walk("", model, False)


def _add_outside(buckets: list[Suggestion], fqn: str) -> None:
    """Add a module outside of the layers to the bucket of its place, the last one or a new one."""
    if buckets and not buckets[-1].is_layer and not buckets[-1].why:
        buckets[-1] = replace(buckets[-1], fqns=(*buckets[-1].fqns, fqn))
    else:
        buckets.append(Suggestion((fqn,), False, ""))


def _say_places(buckets: Sequence[Suggestion]) -> list[Suggestion]:
    """Return the buckets, those outside of the layers with their place as the reason."""
    at_layers = [place for place, bucket in enumerate(buckets) if bucket.is_layer]
    said = []
    for place, bucket in enumerate(buckets):
        if not bucket.why:
            why = "registered between the layers"
            if place < at_layers[0]:
                why = "registered before the layers"
            elif place > at_layers[-1]:
                why = "registered after the layers"
            bucket = replace(bucket, why=why)
        said.append(bucket)
    return said


def _join_ties(model: nn.Module, buckets: list[Suggestion]) -> list[Suggestion]:
    """Join the buckets that share a parameter into the last of them.

    Raises:
        PlanError: one of them is a layer.
    """
    for names in tied_parameters(model).values():
        plan = Plan([bucket.entry for bucket in buckets])
        places = set()
        for name in names:
            found = plan.bucket_of(name.rpartition(".")[0])
            assert found is not None
            places.add(plan.buckets.index(found))
        if len(places) == 1:
            continue
        shared = [buckets[place] for place in sorted(places)]
        tie = f"{names[0]} is {' and '.join(names[1:])}"
        if any(bucket.is_layer for bucket in shared):
            raise PlanError(
                f"{tie}, and one of them is in a layer: FSDP2 manages a shared parameter in one "
                "group, and a layer is a group of its own. Register the module that both use once, "
                "outside of the layers, or give up sharing"
            )
        fqns: tuple[str, ...] = ()
        for bucket in shared:
            fqns += bucket.fqns
        joined = Suggestion(fqns, False, f"{tie}: FSDP2 keeps a tied parameter in one group")
        buckets = [bucket for bucket in buckets if bucket not in shared] + [joined]
    return buckets


def _experts_of(layer: str, module: nn.Module) -> str:
    """Return the FQN of the routed experts of a layer, or "".

    A ModuleList of experts stays in its layer: ``fully_shard`` cannot wrap it as one.
    """
    for path, inner in module.named_modules(prefix=layer):
        name = path.rpartition(".")[2]
        is_routed = name.endswith("experts") and "shared" not in name and path != layer
        if is_routed and _holds_parameters(inner) and not isinstance(inner, _CONTAINERS):
            return path
    return ""
