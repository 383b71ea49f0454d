"""Fake tensors for a whole test, on devices that the machine does not have.

A build of torch with CUDA gives fake CUDA tensors a device guard without a GPU, which is enough for
forwards. A build for CPU has none: autograd asks for it in C++ where no exception may pass, and the
process ends.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pytest_gtrainer._torch import private_names

with private_names():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_leaves


_VIEWS = ("T", "mT", "H", "mH", "real", "imag")


class NoDeviceGuard(RuntimeError):
    """Autograd of fake CUDA tensors, in a torch that is built for CPU."""


class _RefuseAutogradOfCuda(TorchFunctionMode):
    """Raise before an operator is called whose autograd would end the process."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        # Only these attributes are operators; others, such as the shape, compute nothing.
        is_operator = getattr(func, "__name__", "") != "__get__" or name in _VIEWS
        if torch.is_grad_enabled() and is_operator:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and _needs_guard(value):
                    raise NoDeviceGuard(
                        f"{name} of a fake {value.device} tensor that requires a gradient: torch "
                        f"{torch.__version__} is built for CPU, where autograd has no such device. "
                        "Take torch.no_grad(), fake CPU tensors, or for forwards a torch that is "
                        "built with CUDA"
                    )
        return func(*args, **kwargs)


def _needs_guard(value: torch.Tensor) -> bool:
    return value.requires_grad and value.device.type == "cuda"


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make every new tensor a fake one, of any device."""
    with ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode())
        if not torch.backends.cuda.is_built():
            stack.enter_context(_RefuseAutogradOfCuda())
        yield mode
