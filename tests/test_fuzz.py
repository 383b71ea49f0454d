"""Damaged graph texts and records: read, or refused by the one documented error; what fuzzing has
found stays so.

``GT_FUZZ_SECONDS=1800 GT_FUZZ_SEED=0 pytest -s -m long tests/test_fuzz.py`` runs each of the two
for so many seconds of CPU time. Batch n of a run draws its examples from the seed GT_FUZZ_SEED + n,
so each can be drawn again.
"""

import contextlib
import json
import os
import resource
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gtrainer.graphtext import TextError, parse
from pytest_gtrainer.numerics.bits import byte_view
from pytest_gtrainer.numerics.record import Record

pytestmark = pytest.mark.second_tier

ROOT = Path(__file__).parents[1]
SECONDS = float(os.environ.get("GT_FUZZ_SECONDS", 20))  # of CPU time, for each target
SEED = int(os.environ.get("GT_FUZZ_SEED", 0))
BATCH = 500  # examples of a seed
SLOW = 20.0  # CPU seconds in which an example must be read
MEMORY = 6 << 30  # bytes of address space that reading may take in addition

# -- graph texts

FOLDERS = (ROOT / "fixtures" / "graphs", ROOT / "golden", ROOT / "tests" / "graphtext")
TEXTS = sorted(
    {
        file.read_text()
        for folder in FOLDERS
        for file in sorted(folder.rglob("*.fxgraph"))
        if file.stat().st_size < 4000
    }
)
WORDS_OF_TEXTS = r"""
( ) [ ] { } : , = . \ # ' " * ** / // - + % << ~ @ | ... ''' not lambda: f'{x}' b'x' 'x' 10**30
1e400 1e-400 1j -1 0 1 9999999999999999999 True None yield return import async await L _ P B I A
out fwd bwd i [i-1] [i+1] [-1] u0 s0 s0*u0 size(4) sym( FloorDiv( Mod( Max( i64[3-u0] f32 bf16
i64 f32[2] f32[0] f32[s0,u0] f32[2]*2 const( group( group(range(0,10**30)) group(range(4)) range(
like( after( mesh( device( dtype( aten.add.Tensor aten.mm aten.relu( aten. _c10d. hop.cond(
hop.none prims. method. torch. math. operator. layers.0 layers[0:4] saved managed=[
"""
PIECES = [
    *WORDS_OF_TEXTS.split(),
    "\n",
    "\n  ",
    "\n    ",
    "  ",
    "\t",
    "\r",
    "\r\n",
    "\x00",
    "\x0c",
    "\u202e",
    "\ufeff",
    "\u00e9",
    "\ud7ff",
    "\U0001d41a",
    " if ",
    " else ",
    "if ",
    "for i in ",
    "with ",
    "while ",
    "def f():",
    "class C:",
    "s0 = size(4)\n",
    " @ cuda",
    " @ meta",
    "# gtrainer graph v2",
    "# gtrainer graph v",
    "# view: full",
    "9" * 4300,
    "(" * 120,
    "[" * 120,
    "-" * 200,
    "x." * 200,
    "1+" * 300,
]


@st.composite
def damaged_texts(draw):
    """A text of the repository, or nothing, with up to eight pieces cut, doubled, moved, put in."""
    text = draw(st.sampled_from(["", *TEXTS]))
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(text)))
        length = draw(st.sampled_from([0, 0, 1, 1, 2, 5, 20, 80]))
        other = draw(st.integers(0, len(text)))
        piece = draw(
            st.one_of(
                st.sampled_from(PIECES),
                st.just(""),
                st.just(text[other : other + max(length, 10)]),
                st.text(max_size=6),
                st.integers().map(str),
                st.floats().map(repr),
            )
        )
        text = text[:at] + piece + text[at + length :]
    return text


def read_text(text: str, folder: Path) -> str:
    try:
        parse(text)
    except TextError:
        return "refused"
    return "read"


# -- records

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from([8, 16, 64, 70, 128, 2**31, 2**62, 2**63, 2**64, 10**30, 1e400]),
)
NAMES_OF_DTYPES = """
float32 bfloat16 uint8 bool complex64 float8_e4m3fn int64 qint8 bits8 uint3 float4_e2m1fn_x2
Tensor load nn __name__ float32.x dtype ops
"""
DTYPES = st.sampled_from(NAMES_OF_DTYPES.split())
FIELDS = ("world_size", "rank", "meta", "begins", "tensors")
WORDS = st.one_of(
    st.sampled_from(["weight", "gradient", "loss", "w", "a.b", "module", "\ud800"]),
    st.text(max_size=4),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
SMALL, EXTENTS = st.integers(0, 2), st.lists(st.integers(0, 4), max_size=3)
SHAPES = st.one_of(EXTENTS, st.lists(st.one_of(st.integers(0, 4), NUMBERS), max_size=4), VALUES)
ROWS = st.one_of(
    st.tuples(SMALL, SMALL, WORDS, WORDS, DTYPES, EXTENTS, NUMBERS),
    st.tuples(*[NUMBERS | VALUES] * 2, *[WORDS | VALUES] * 2, DTYPES | VALUES, SHAPES, NUMBERS),
    VALUES,
)
EDITS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([*FIELDS, "else"]), NUMBERS | VALUES),
        st.tuples(st.just("row"), ROWS),
        st.tuples(st.just("remove"), st.sampled_from(FIELDS)),
    ),
    max_size=4,
)
JSON = st.sampled_from([b"[" * 3000, b"{", b"NaN", b"-", b"1e999", b"null"])
RAW = st.lists(
    st.tuples(st.integers(0, 1200), st.integers(0, 40), st.binary(max_size=9) | JSON), max_size=4
)


@st.composite
def damaged_records(draw):
    """Bytes of a record whose index holds other things, and that is then cut and written over."""
    data, index = _record()
    header = json.loads(index)
    for what, value in draw(EDITS):
        if what == "row":
            header["tensors"] = [
                *(rows if isinstance(rows := header.get("tensors"), list) else []),
                value,
            ]
        elif what == "remove":
            header.pop(value, None)
        else:
            header[what] = value
    index = json.dumps(header).encode()
    length = draw(st.sampled_from([len(index)] * 8 + [0, 1, len(index) + 1, 2**40, 2**64 - 1]))
    whole = data + index + length.to_bytes(8, "little")
    for from_end, cut, piece in draw(RAW):
        at = max(0, len(whole) - from_end)
        whole = whole[:at] + piece + whole[at + cut :]
    return whole


_RECORD: list[bytes] = []


def _record() -> tuple[bytes, bytes]:
    if not _RECORD:
        record = Record(2, meta={"a": "b"})
        for rank in range(2):
            record.add(0, rank, "weight", "w", torch.arange(6.0).view(2, 3))
            record.add(0, rank, "gradient", "w", torch.ones(3, dtype=torch.bfloat16))
            record.add(1, rank, "loss", "", torch.zeros(()))
        with tempfile.TemporaryDirectory() as folder:
            record.save(Path(folder, "run"))
            whole = Path(folder, "run").read_bytes()
        begins = whole.rindex(b'{"world_size"')
        _RECORD.extend([whole[:begins], whole[begins:-8]])
    data, index = _RECORD
    return data, index


def read_record(content: bytes, folder: Path) -> str:
    """Read a record: all of it can be looked at, and be written again."""
    file = folder / "run"
    file.unlink(missing_ok=True)  # a record of the example before may map it
    file.write_bytes(content)
    try:
        record = Record.load(file)
    except ValueError:
        return "refused"
    repr(record), record.ranks, record.steps, len(record)
    for key, tensor in record.items():
        assert key in record
        byte_view(tensor).clone()  # what digests and comparisons read
    record.save(folder / "again")
    return "read"


# -- both

HOW = settings(
    max_examples=BATCH,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TARGETS = {"parse": (damaged_texts(), read_text), "record": (damaged_records(), read_record)}


@contextlib.contextmanager
def bounded():
    """A process that would take all memory gets a MemoryError instead."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "seconds", [5.0, pytest.param(SECONDS, marks=pytest.mark.long)], ids=["briefly", "long"]
)
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz(target, seconds, tmp_path):
    """Run for so many seconds of CPU time; each failure is reported with its seed, and the next
    seed is tried.
    """
    examples, read = TARGETS[target]
    counts: Counter[str] = Counter()
    found: dict[str, str] = {}
    seed, began = SEED, time.process_time()

    def check(example):
        start = time.process_time()
        with warnings.catch_warnings(action="ignore"):
            counts[read(example, tmp_path)] += 1
        assert time.process_time() - start < SLOW, "too slow"

    with bounded():
        while time.process_time() - began < seconds:
            batch = given(example=examples)(check)
            batch = HOW(hypothesis.seed(seed)(batch))
            try:
                batch()
            except Exception as error:
                notes = "\n".join(getattr(error, "__notes__", []))
                place = traceback.extract_tb(error.__traceback__)[-1]
                key = f"{type(error).__name__} at {place.filename}:{place.lineno}"
                if key not in found:
                    found[key] = f"seed {seed}: {key}: {str(error)[:300]}\n{notes[:3000]}"
                    print(found[key], flush=True)
            spent = time.process_time() - began
            tried = f"{sum(counts.values())} examples of seeds {SEED} to {seed}"
            print(f"{target}: {tried}, {spent:.0f} CPU s: {dict(counts)}", flush=True)
            seed += 1
    assert not found, "\n\n".join(found.values())
