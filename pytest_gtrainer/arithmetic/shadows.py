"""Shadows: the elements of a tensor's memory, beside its real numbers.

Every storage that holds *abstract* numbers has a shadow, one int64 for each element. Views share
the storage, so they share the shadow, and a write through one view is seen through all. A tensor
without a shadow is *known*: its real numbers are its value.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_gtrainer._torch.arithmetic import StorageWeakRef
from pytest_gtrainer._torch.random_states import without_modes
from pytest_gtrainer._torch.values import storage_id
from pytest_gtrainer.arithmetic.values import NoMeaning, Value


@dataclass(slots=True)
class _Shadow:
    storage: StorageWeakRef  # keeps the storage's address from being used again
    dtype: torch.dtype
    fits: torch.dtype
    elements: Tensor


class Shadows:
    """The shadows of one run, by storage."""

    def __init__(self) -> None:
        self._of: dict[int, _Shadow] = {}
        self._most = 1024

    def _find(self, tensor: Tensor) -> _Shadow | None:
        return self._of.get(storage_id(tensor)) if self._of else None

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is abstract."""
        return tensor.layout is torch.strided and self._find(tensor) is not None

    def has_complex(self, tensor: Tensor) -> bool:
        """Return whether a complex tensor has an element for each number, and not for its parts."""
        shadow = self._find(tensor)
        return shadow is not None and shadow.dtype.is_complex

    def read(self, tensor: Tensor) -> Value | None:
        """Return an abstract tensor's value, which shares the shadow; None for a known tensor."""
        if tensor.layout is not torch.strided:
            return None
        shadow = self._find(tensor)
        if shadow is None:
            return None
        if tensor.is_neg():
            raise NoMeaning("a view of numbers with the other sign, as x.conj().imag is")
        if shadow.dtype != tensor.dtype:
            raise NoMeaning(
                f"memory of abstract {shadow.dtype} numbers is read as {tensor.dtype}: "
                "an element has no bytes"
            )
        missing = _count(tensor) - shadow.elements.numel()
        if missing > 0:
            raise NoMeaning("a storage has grown: who reads it would read memory nobody wrote")
        elements = shadow.elements.as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        return Value(elements, shadow.dtype, shadow.fits)

    def write(self, tensor: Tensor, elements: Tensor, fits: torch.dtype | None = None) -> None:
        """Make a tensor abstract, or write to the part of its storage's shadow that it shows.

        A tensor that is part of known memory must be made abstract as a whole first.
        """
        if tensor.layout is not torch.strided:
            raise NoMeaning(f"a tensor of layout {tensor.layout}")
        fits = fits or tensor.dtype
        count = _count(tensor)
        shadow = self._find(tensor)
        is_whole = tensor.numel() == count and tensor.is_contiguous()
        if shadow is not None and shadow.dtype != tensor.dtype and not is_whole:
            raise NoMeaning(
                f"memory of abstract {shadow.dtype} numbers is written as {tensor.dtype}: "
                "an element has no bytes"
            )
        if shadow is None or is_whole:
            flat = torch.zeros(count, dtype=torch.int64)
            self._add(tensor, flat, fits)
            shadow = self._find(tensor)
        assert shadow is not None
        if shadow.elements.numel() < count:
            shadow.elements = torch.nn.functional.pad(
                shadow.elements, (0, count - shadow.elements.numel())
            )
        if shadow.fits != fits:
            shadow.fits = tensor.dtype
        place = shadow.elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        place.copy_(elements)

    def _add(self, tensor: Tensor, elements: Tensor, fits: torch.dtype) -> None:
        if len(self._of) >= self._most:
            expired = [key for key, each in self._of.items() if each.storage.expired()]
            for key in expired:
                del self._of[key]
            self._most = max(1024, 2 * len(self._of))
        storage = tensor.untyped_storage()
        self._of[storage_id(tensor)] = _Shadow(
            StorageWeakRef(storage), tensor.dtype, fits, elements
        )

    def free(self, tensor: Tensor, uninitialised: Callable[[int], Tensor]) -> None:
        """Note that the memory of an abstract tensor is freed: if it is made again, it is new."""
        shadow = self._find(tensor)
        if shadow is not None and shadow.elements.numel():
            shadow.elements = uninitialised(shadow.elements.numel())

    def drop(self, tensor: Tensor) -> None:
        """Make a tensor known: all of its storage has been overwritten with known numbers."""
        self._of.pop(storage_id(tensor), None)


class Marks:
    """A set of tensors, by storage: views of one are in it, too."""

    def __init__(self) -> None:
        self._of: dict[int, StorageWeakRef] = {}
        self._most = 1024

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and storage_id(tensor) in self._of

    def add(self, tensor: Tensor) -> None:
        if len(self._of) >= self._most:
            self._of = {key: each for key, each in self._of.items() if not each.expired()}
            self._most = max(1024, 2 * len(self._of))
        self._of[storage_id(tensor)] = StorageWeakRef(tensor.untyped_storage())


def _count(tensor: Tensor) -> int:
    """Return how many elements a tensor's storage has."""
    return tensor.untyped_storage().nbytes() // tensor.itemsize


def whole_storage(tensor: Tensor) -> Tensor:
    """Return all of a tensor's storage, as one dimension."""
    with without_modes():
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), 0, (_count(tensor),), (1,))
