"""Checks of what a net is built from and given; one sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a whole number, 1 or more."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(choices)}")


def check_members(members: tuple[int, ...], size: int) -> None:
    """Raise ValueError unless ``members`` are different ranks of a world of ``size``."""
    if not members:
        raise ValueError("a group without ranks has no net: name at least one rank")
    if len(set(members)) < len(members):
        raise ValueError(f"the group {members} repeats a rank: name each once")
    outside = [rank for rank in members if not 0 <= rank < size]
    if outside:
        raise ValueError(f"rank {outside[0]} of the group is not in the world of {size} ranks: they are 0..{size - 1}")


def check_rows(collective: str, inputs: Tensor, ranks: int, *, parts: int = 1) -> None:
    """Raise ValueError unless ``inputs`` has one row for each rank, of so many equal parts."""
    if inputs.dim() != 2 or inputs.shape[0] != ranks:
        raise ValueError(f"{collective} takes one row for each of {ranks} ranks; not shape {tuple(inputs.shape)}")
    if inputs.shape[1] % parts:
        raise ValueError(f"{collective} of {inputs.shape[1]} elements over {parts} ranks: pad them first")


def check_element(collective: str, offset: int, count: int) -> None:
    """Raise ValueError unless the collective reduces, and its payload of ``count`` elements has this one."""
    check_choice("collective", collective, ("reduce_scatter", "all_reduce"))
    if not 0 <= offset < count:
        raise ValueError(f"element {offset} is not in a payload of {count}")
