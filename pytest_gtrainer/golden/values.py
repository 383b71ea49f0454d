"""Goldens of numbers: exact, and with the environment that they were obtained in.

A file, in JSON, holds one *entry* for each environment that a person has accepted numbers in; only
equal environments are compared. Floats are read back bit for bit; -0.0 and 0.0 differ, so do 1 and
1.0, and so do NaNs of other bits: one that is not Python's ``nan`` is written
``{"NaN": "0xfff8000000000000"}``. JSON has text keys alone, so a text key that looks like a number
gets quotes: ``{1: 0.5}`` is written ``{"1": 0.5}``, and ``{"1": 0.5}`` ``{"'1'": 0.5}``.
"""

import contextlib
import json
import math
import re
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
_MARK = re.compile(r"numbers v(\d{1,9})")
_MOST_WORDS = 12
_DEEPEST = 50
_KEYS = ("gtrainer", "test", "remake", "entries")
_KEYS_OF_AN_ENTRY = ("environment", "values")

_NAN = 0x7FF8000000000000
_QUOTED_KEYS = re.compile(r"'*(-?\d+|NaN)'*", re.ASCII)
"""Texts that get quotes as keys: integers, the mark of a NaN, and both with quotes already."""

_DIGEST = re.compile(r"\b(xxh3_128|sha256|mix128):[0-9a-f]+")

_WHEEL = re.compile(r"\+(cpu|xpu|cu\d+|rocm[\d.]+)$")
"""The tag of a wheel: which devices it was built for, besides the CPU."""

Environment = Mapping[str, Any]


class NumbersError(Exception):
    """A text that is not a golden of numbers; the message is one sentence without a subject."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Numbers, and the environment that they were obtained in."""

    environment: Environment
    values: Any

    def __str__(self) -> str:
        """Return the environment in words."""
        return ", ".join(f"{name} {value}" for name, value in self.environment.items())


def decisive(environment: Environment) -> Environment:
    """Return an environment without the tag of torch's own wheels, if the CPU computes.

    The wheels of a release have one source, compiler, MKL and oneDNN: ``+cpu`` and ``+cu130`` of
    2.13.0 gave the same bits on the CPU. On a GPU the tag stands for the versions of cuBLAS and
    cuDNN. Any other tag is that of somebody's own build.
    """
    if environment.get("device") != "cpu" or "torch" not in environment:
        return environment
    return {**environment, "torch": _WHEEL.sub("", str(environment["torch"]))}


def plain(value: Any, place: str = "") -> Any:
    """Return numbers in JSON's types, sorted by key.

    Raises:
        TypeError: other values or keys.
        ValueError: they are nested too deeply.

    >>> plain({"loss": (0.5, 1), 10: True, 2: None, "2": 0})
    {'2': None, '10': True, "'2'": 0, 'loss': [0.5, 1]}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return _written(value, place)
    if isinstance(value, float):
        (bits,) = struct.unpack("<Q", struct.pack("<d", value))
        if math.isnan(value) and bits != _NAN:
            return {"NaN": hex(bits)}
        return float(value)

    if place.count("[") > _DEEPEST:
        raise ValueError(f"numbers are nested more than {_DEEPEST} deep")
    if isinstance(value, list | tuple):
        return [plain(each, f"{place}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        keys = {}
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"keys of numbers are str or int; not {key!r}")
            # An ``IntEnum`` is written as its number.
            spelled = key if isinstance(key, str) else _written(key, f"{place}[...]")
            spelled = str(spelled)
            if isinstance(key, str) and _QUOTED_KEYS.fullmatch(key):
                spelled = f"'{key}'"
            keys[spelled] = key
        return {
            name: plain(value[keys[name]], f"{place}[{name!r}]")
            for name in sorted(keys, key=_natural)
        }

    kind = type(value).__name__
    where = f" at {place}" if place else ""
    if kind in ("Tensor", "DTensor", "Parameter"):
        where += ": give its digest, or item() of a single value"
    raise TypeError(
        f"numbers are made of int, float, bool, str, None, lists and dicts; not of {kind}{where}"
    )


def _written(number: int, place: str) -> int:
    """Return a number of a type of its own as an integer; refuse one that Python reads no text of.

    Raises:
        ValueError: it has too many digits.
    """
    most = sys.int_info.default_max_str_digits
    # Almost all numbers are short, so the power is seldom computed.
    if number.bit_length() > 3 * most and abs(number) >= 10**most:
        where = f" at {place}" if place else ""
        raise ValueError(
            f"an integer{where} has more than {most:,} digits, and Python reads no such text: give "
            "hex(number), which is a text"
        )
    return int(number)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layers.2 before layers.10."""
    key = []
    for part in re.split(r"(\d+)", name):
        digits = part.lstrip("0")  # as a number: more digits come later
        key.append((len(digits), digits) if part.isdecimal() else (-1, part))
    return key


def text_of(fields: Mapping[str, str], entries: list[Entry]) -> str:
    """Return the text of a golden with the fields of its header and its entries."""
    listed = [{"environment": dict(entry.environment), "values": entry.values} for entry in entries]
    content = {"gtrainer": f"numbers v{VERSION}", **fields, "entries": listed}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def entries_of(text: str) -> list[Entry]:
    """Return the entries of a golden.

    Raises:
        NumbersError: the text is no golden of numbers, has a newer format, or says two things about
            one environment.
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_doubled_keys)
    except ValueError as error:
        raise NumbersError(f"is not JSON ({error}): restore or remake it") from None
    except RecursionError:
        raise NumbersError("is nested too deeply: restore or remake it") from None

    mark = None
    if isinstance(content, dict):
        mark = _MARK.fullmatch(str(content.get("gtrainer")))
    if mark is None:
        raise NumbersError(f'does not say "gtrainer": "numbers v{VERSION}": restore or remake it')
    if int(mark[1]) > VERSION:
        raise NumbersError(
            f"has format v{mark[1]} and this pytest-gtrainer reads v{VERSION}: it was made by a "
            "newer one, so upgrade"
        )

    _refuse_unknown_keys(content, _KEYS)
    entries: list[Entry] = []
    try:
        for each in content["entries"]:
            # As they stand in the file: its keys have the quotes that they need.
            entry = Entry(decisive(dict(each["environment"])), each["values"])
            plain(entry.values)  # refuses what is nested too deeply
            _refuse_unknown_keys(each, _KEYS_OF_AN_ENTRY)
            for other in entries:
                # Two wheels of one release may have an entry each in an old file: nothing is wrong
                # if these are equal.
                is_same = other.environment == entry.environment
                if is_same and differences(other.values, entry.values):
                    raise NumbersError(
                        "has two entries with different values for one environment "
                        f"({entry}): remove one"
                    )
            entries.append(entry)
    except (TypeError, KeyError, ValueError):
        entries = []

    if not entries:
        raise NumbersError(
            "has no list of entries with environment and values: restore or remake it"
        )

    return entries


def _without_doubled_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict.

    A doubled key is refused: Python would take the last one, a reader of the file the first.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise NumbersError(
                f"has the key {key!r} twice in one object: remove one, or restore it"
            )
        found[key] = value
    return found


def _refuse_unknown_keys(content: Mapping[str, Any], known: Collection[str]) -> None:
    for key in content:
        if key not in known:
            raise NumbersError(
                f"has the unknown key {key!r}, which nothing compares: remove it, or restore the "
                "file"
            )


def not_a_proof(value: Any) -> list[str]:
    """Return what many computations give: values that are NaN or infinite, or no value at all.

    >>> not_a_proof({"losses": [1.0, float("nan")], "norm": float("-inf")})
    ['losses[1] is NaN', 'norm is -Infinity']
    >>> not_a_proof({"losses": [], "weights": {}}), not_a_proof({"losses": [], "steps": 0})
    (['no value is in it'], [])
    """
    found = []
    leaves = list(_leaves(value))
    if all(spelled in ("[]", "{}", "null", '""') for _, spelled in leaves):
        return ["no value is in it"]
    for place, spelled in leaves:
        if spelled in ("Infinity", "-Infinity") or spelled.startswith("NaN"):
            found.append(f"{place or 'the value'} is {spelled}")
    return found


def are_computed(value: Any) -> bool:
    """Return whether floats or digests of tensors are in it, and not only counts and names.

    >>> are_computed({"losses": [0.5]}), are_computed("xxh3_128:5f0c"), are_computed({"mm": 3})
    (True, True, False)
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(are_computed(each) for each in value)
    if isinstance(value, str):
        return _DIGEST.search(value) is not None
    return isinstance(value, float)


def maker(text: str) -> str | None:
    """Return the test in the header of a golden; None if there is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or "test" not in content:
        return None
    return str(content["test"])


def merged(golden: str, obtained: str) -> str:
    """Return a golden with the obtained entry in place of that of its environment.

    Raises:
        NumbersError: the golden is damaged.
    """
    (new,), entries = entries_of(obtained), entries_of(golden)
    fields = json.loads(obtained)
    del fields["gtrainer"], fields["entries"]
    place = len(entries)
    for at in reversed(range(len(entries))):
        if entries[at].environment == new.environment:
            del entries[at]
            place = at
    entries.insert(place, new)
    return text_of(fields, entries)


def devices(text: str) -> set[str]:
    """Return the kinds of devices of a golden's entries; none if it cannot be read."""
    kinds = set()
    with contextlib.suppress(NumbersError):
        for entry in entries_of(text):
            # "cuda NVIDIA H200": the kind, then the model.
            kinds.add(str(entry.environment.get("device", "cpu")).split(" ")[0])
    return kinds


def differences(old: Any, new: Any) -> list[str]:
    """Return a sentence for each value that differs; none if nothing does."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    found = []
    for place in dict.fromkeys([*after, *before]):
        one, other = before.get(place), after.get(place)
        if one == other:
            continue
        change = f"{one} became {other}"
        if one is None:
            change = f"gained {other}"
        elif other is None:
            change = f"lost {one}"
        found.append(f"{place or 'the value'}: {change}")

    if (left := len(found) - _MOST_WORDS) > 0:
        found[_MOST_WORDS:] = [f"… and {left} more of {len(before | after)} values"]
    return found


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the single values with their places, spelled; an empty list or mapping is one, too."""
    if isinstance(value, dict) and list(value) == ["NaN"]:
        yield place, f"NaN {value['NaN']}"
    elif isinstance(value, dict) and value:
        for name, each in value.items():
            spelled = f".{name}" if name.isidentifier() else f"[{name!r}]"
            yield from _leaves(each, (place + spelled).removeprefix("."))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from _leaves(each, f"{place}[{index}]")
    else:
        yield place, json.dumps(value, ensure_ascii=False)
