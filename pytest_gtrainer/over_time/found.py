"""Find what a running script trains: its model, its optimisers, and other modules beside them.

torch has no list of them, so the objects of the process are looked through, once.
"""

import gc
from collections.abc import Collection, Iterator
from typing import TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pytest_gtrainer._torch.wrapped_modules import unwrapped, wrapped_by

Kind = TypeVar("Kind")


def _living(kind: type[Kind]) -> list[Kind]:
    living = []
    for each in gc.get_objects():
        # ``isinstance`` would ask proxies for their class, which may import or warn.
        if not issubclass(type(each), kind):
            continue
        # Of what failed in ``__init__``, or is still there, nothing can be asked.
        attributes = "training", "param_groups"
        if any(hasattr(each, attribute) for attribute in attributes):
            living.append(each)
    return living


def class_of(module: nn.Module) -> str:
    """Return the name of a module's class, without wrappers and before ``fully_shard``."""
    module = unwrapped(module)
    name = type(module).__name__
    if wrapped_by(module) == "fully_shard":
        return name.removeprefix("FSDP")
    return name


def outermost(module: nn.Module) -> nn.Module:
    """Return the largest module that contains ``module``: a trainer may run only its parts."""
    containing = [each for each in _living(nn.Module) if any(p is module for p in each.modules())]
    return max(containing, key=lambda each: sum(1 for _ in each.modules()), default=module)


def is_trained(module: nn.Module) -> bool:
    """Return whether an optimiser trains a parameter of ``module``, as far as can be seen.

    An optimiser may hold copies that are in no module, as in another precision: then any module may
    be theirs.
    """
    held: set[int] = set()
    for optimizer in _living(torch.optim.Optimizer):
        for group in optimizer.param_groups:
            held.update(id(parameter) for parameter in group["params"])
    if any(id(parameter) in held for parameter in module.parameters()):
        return True
    for other in _living(nn.Module):
        if any(id(parameter) in held for parameter in other.parameters()):
            return False
    return bool(held)


def holder_of(parameters: list[Tensor]) -> nn.Module | None:
    """Return the smallest module that holds all ``parameters``; None if no module does."""
    wanted = {id(parameter) for parameter in parameters}
    holding = [
        module for module in _living(nn.Module) if wanted <= {id(p) for p in module.parameters()}
    ]
    return min(holding, key=lambda each: sum(1 for _ in each.modules()), default=None)


def model_with_gradients() -> nn.Module | None:
    """Return the smallest module that holds the parameters of an optimiser, some with gradients;
    None if there is none.
    """
    for optimizer in _living(torch.optim.Optimizer):
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if any(parameter.grad is not None for parameter in parameters):
            model = holder_of(parameters)
            if model is not None:
                return model
    return None


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimisers that hold a parameter of ``model``, in the order of these."""
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    found = []
    for number, optimizer in enumerate(_living(torch.optim.Optimizer)):
        own = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in places:
                    own.append(places[id(parameter)])
        if own:
            found.append((min(own), number, optimizer))
    # Objects of the process come in no order that another run would have.
    return [optimizer for _, _, optimizer in sorted(found)]


def living_modules() -> WeakSet[nn.Module]:
    """Return the modules that there are before a script runs, without keeping them."""
    return WeakSet(_living(nn.Module))


def modules_beside(
    model: nn.Module, earlier: Collection[nn.Module] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield outermost modules with state that share no parameter with ``model``, as an average of
    its weights, each with the name of its class, numbered from the second of a class on.

    Modules that are in ``earlier`` are not the script's.
    """
    modules = [module for module in _living(nn.Module) if module not in earlier]
    inner = {id(child) for module in modules for child in module.children()}
    known = {id(parameter) for parameter in model.parameters()}
    counts: dict[str, int] = {}
    for module in modules:
        tensors = [*module.parameters(), *module.buffers()]
        is_beside = id(module) not in inner and not any(id(tensor) in known for tensor in tensors)
        if tensors and is_beside:
            name = class_of(module)
            counts[name] = number = counts.get(name, 0) + 1
            yield name if number == 1 else f"{name}#{number}", module
