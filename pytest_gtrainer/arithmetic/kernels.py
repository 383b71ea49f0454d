"""Formulas of kernels that torch does not decompose: pools, reductions by index, optimisers.

They compute the same numbers in other steps, so they are for exact arithmetic alone.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


# --- pools


def _windows_of_pool(
    dims: int,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil: bool,
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return kernel, stride, and pads on the left and right for each pooled dimension."""

    def for_each(numbers: Sequence[int]) -> list[int]:
        return list(numbers) * dims if len(numbers) == 1 else list(numbers)

    kernel, padding = for_each(kernel), for_each(padding)
    stride = for_each(stride) or kernel
    right = []
    for place in range(dims):
        extent, own = x.shape[place - dims], padding[place]
        steps = extent + 2 * own - kernel[place]
        count = (math.ceil(steps / stride[place]) if ceil else steps // stride[place]) + 1
        # The last window begins inside of the tensor, or of its left pad.
        if ceil and (count - 1) * stride[place] >= extent + own:
            count -= 1
        right.append((count - 1) * stride[place] + kernel[place] - extent - own)
    return kernel, stride, padding, right


def _divisors_of_pool(x: Tensor, windows: Any, includes_pads: bool, override: int | None) -> Tensor:
    kernel, stride, left, right = windows
    if override:
        return torch.full((), float(override), dtype=x.dtype)
    ones = torch.ones(x.shape[-len(kernel) :], dtype=x.dtype)
    if includes_pads:
        # What ceil_mode adds on the right is no pad.
        ones = torch.nn.functional.pad(ones, _both(left, map(min, left, right)), value=1.0)
        right = [max(0, own - pad) for own, pad in zip(right, left, strict=True)]
        left = [0] * len(left)
    return _sum_windows(ones, (kernel, stride, left, right))


def _both(left: Sequence[int], right: Any) -> list[int]:
    """Return pads as ``torch.nn.functional.pad`` takes them, the last dimension first."""
    pads: list[int] = []
    for pair in reversed(list(zip(left, right, strict=True))):
        pads.extend(pair)
    return pads


def _sum_windows(x: Tensor, windows: Any) -> Tensor:
    kernel, stride, left, right = windows
    # A negative pad cuts off what no window reads.
    x = torch.nn.functional.pad(x, _both(left, right))
    for own, step in zip(kernel, stride, strict=True):
        x = x.unfold(-len(kernel), own, step)  # it puts a dimension at the end
    return x.sum(list(range(-len(kernel), 0)))


def _avg_pool(
    dims: int,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    windows = _windows_of_pool(dims, x, kernel_size, stride, padding, ceil_mode)
    divisors = _divisors_of_pool(x, windows, count_include_pad, divisor_override)
    return _sum_windows(x, windows) / divisors


def _avg_pool_backward(
    dims: int,
    grad_output: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Return the gradient of the input: each window gives its elements equal shares."""
    windows = _windows_of_pool(dims, x, kernel_size, stride, padding, ceil_mode)
    kernel, steps, left, right = windows
    shares = grad_output / _divisors_of_pool(x, windows, count_include_pad, divisor_override)
    shape = list(x.shape)
    for place in range(dims):
        shape[place - dims] += left[place] + right[place]
    result = torch.zeros(shape, dtype=x.dtype)

    # One place of the window at a time, in all windows at once.
    for offsets in itertools.product(*map(range, kernel)):
        part = result
        for place, offset in enumerate(offsets):
            extent = (shares.shape[place - dims] - 1) * steps[place] + 1
            every = slice(None, None, steps[place])
            part = part.narrow(place - dims, offset, extent)
            part = part[(..., every, *[slice(None)] * (dims - place - 1))]
        part += shares

    return torch.nn.functional.pad(result, _both([-pad for pad in left], [-pad for pad in right]))


# --- reductions by index


def _reduce_at(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    """Reduce to each place the elements of ``source`` that go there."""
    if not x.ndim:
        args = x.reshape(1), 0, index.reshape(-1), source.reshape(-1)
        return _reduce_at(*args, reduce, include_self).reshape(())
    source = source[tuple(map(slice, index.shape))]
    ends = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}
    result = x if include_self else x.scatter(dim, index, ends[reduce])
    if reduce in ("sum", "mean"):
        result = result.scatter_add(dim, index, source)
        if reduce == "sum":
            return result
        ones = torch.ones(x.shape, dtype=x.dtype)
        counts = ones if include_self else ones.scatter(dim, index, 0.0)
        counts = counts.scatter_add(dim, index, torch.ones(index.shape, dtype=x.dtype))
        return result / counts
    for place in range(index.shape[dim]):
        target, own = index.narrow(dim, place, 1), source.narrow(dim, place, 1)
        before = result.gather(dim, target)
        if reduce == "prod":
            after = before * own
        else:
            after = torch.maximum(before, own) if reduce == "amax" else torch.minimum(before, own)
        result = result.scatter(dim, target, after)
    return result


def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    return _reduce_at(x, dim, index, src, reduce, include_self)


def _scatter(x: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str) -> Tensor:
    return _reduce_at(x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if not x.ndim:
        return _reduce_at(x, dim, index, source, reduce, include_self)
    shape = [1] * x.ndim
    shape[dim] = len(index)
    places = index.reshape(shape).expand(source.shape)
    return _reduce_at(x, dim, places, source, reduce, include_self)


# --- products


def _grouped_mm(
    x: Tensor, mat2: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Multiply matrices group by group; offsets say where each group ends."""
    if offs is None:
        result = x @ mat2
        return result if out_dtype is None else result.to(out_dtype)

    parts, start = [], 0
    for group, end in enumerate(offs.tolist()):
        of_group = slice(start, end)
        start = end
        if x.ndim == 2 and mat2.ndim == 3:
            parts.append(x[of_group] @ mat2[group])
        elif x.ndim == 3:
            parts.append(x[group] @ mat2[:, of_group])
        else:
            parts.append(x[:, of_group] @ mat2[of_group])

    if x.ndim == mat2.ndim == 2:
        result = torch.stack(parts)
    else:
        dim = 0 if x.ndim == 2 else 1
        rows = x.shape[0] if dim == 0 else mat2.shape[1]
        result = torch.cat(parts, dim)
        if rows > start:
            shape = list(result.shape)
            shape[dim] = rows - start
            result = torch.cat([result, result.new_empty(shape)], dim)  # nobody writes these
    return result if out_dtype is None else result.to(out_dtype)


def _addbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return beta * x + alpha * (batch1 @ batch2).sum(0)


def _cdist(x1: Tensor, x2: Tensor, p: float, compute_mode: Any) -> Tensor:
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    return torch.linalg.vector_norm(apart, p, -1)


# --- optimisers


def _fused_adam(is_decoupled: bool) -> Callable[..., None]:
    """Return the step of Adam, or that of AdamW, whose weight decay is decoupled."""

    def step(
        params: Any,
        grads: Any,
        averages: Any,
        squares: Any,
        largest: Any,
        steps: Any,
        *,
        lr: Any,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Any = None,
        found_inf: Any = None,
    ) -> None:
        if found_inf is not None and bool(found_inf):
            return

        for place, (param, grad, average, square) in enumerate(
            zip(params, grads, averages, squares, strict=True)
        ):
            count = float(steps[place])
            grad = _gradient_for_step(grad, grad_scale, maximize)
            if is_decoupled:
                param.mul_(1 - lr * weight_decay)
            elif weight_decay:
                grad = grad + weight_decay * param

            average.copy_(beta1 * average + (1 - beta1) * grad)
            square.copy_(beta2 * square + (1 - beta2) * grad * grad)
            if amsgrad:
                largest[place].copy_(torch.maximum(largest[place], square))

            root = (largest[place] if amsgrad else square).sqrt() / (1 - beta2**count) ** 0.5
            param.sub_(lr / (1 - beta1**count) * average / (root + eps))

    return step


def _gradient_for_step(grad: Tensor, grad_scale: Any, maximize: bool) -> Tensor:
    if grad_scale is not None:
        grad.div_(grad_scale)  # the kernel writes it back
    return -grad if maximize else grad


def _fused_sgd(
    params: Any,
    grads: Any,
    momenta: Any,
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> None:
    """Carry out the step of SGD."""
    if found_inf is not None and bool(found_inf):
        return
    for place, (param, grad) in enumerate(zip(params, grads, strict=True)):
        grad = _gradient_for_step(grad, grad_scale, maximize)
        if weight_decay:
            grad = grad + weight_decay * param
        if momentum:
            own = grad
            if not is_first_step:
                own = momentum * momenta[place] + (1 - dampening) * grad
            momenta[place].copy_(own)
            grad = grad + momentum * own if nesterov else own
        param.sub_(lr * grad)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._cdist_forward.default: _cdist,
    aten._fused_adam_.default: _fused_adam(is_decoupled=False),
    aten._fused_adam_.tensor_lr: _fused_adam(is_decoupled=False),
    aten._fused_adamw_.default: _fused_adam(is_decoupled=True),
    aten._fused_adamw_.tensor_lr: _fused_adam(is_decoupled=True),
    aten._fused_sgd_.default: _fused_sgd,
    aten._fused_sgd_.tensor_lr: _fused_sgd,
    aten._grouped_mm.default: _grouped_mm,
    aten.addbmm.default: _addbmm,
    aten.avg_pool2d.default: partial(_avg_pool, 2),
    aten.avg_pool2d_backward.default: partial(_avg_pool_backward, 2),
    aten.avg_pool3d.default: partial(_avg_pool, 3),
    aten.avg_pool3d_backward.default: partial(_avg_pool_backward, 3),
    aten.index_reduce.default: _index_reduce,
    aten.scatter.reduce: _scatter,
    aten.scatter_reduce.two: _scatter_reduce,
}
