"""Run torchtitan's own tests of graph_trainer, unedited, and write what became of each.

    python upstream.py DIR [-j 2] [--run asis ...]

``RUNS`` says which runs there are; a file of tests writes ``DIR/asis/test_passes.json`` and so on. What
is there is not run again, so a command that was cut off goes on. Each file gets a process of its own,
as in torchtitan's CI: importing ``FSDPTest`` freezes the flags that ``test_bitwise_deterministic.py``
sets. This process imports neither torch nor torchtitan.
"""

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
# A test that hangs would take the whole table with it.
LIMIT = 1800
_NOTHING_SELECTED = 5
# Classes that start processes of their own, which no option reaches: on_worlds/ gives them worlds.
_STARTS_PROCESSES = (
    *("TestTraceFSDP", "TestTraceContextParallel", "TestAutogradGradVsBackwardFSDP"),
    *("TestReassignCollectivePgsPass", "TestOverlapPgIsolationPass", "TestBucketingPrefetchOrder"),
    *("TestAsyncTensorParallelPass", "TestSimpleFSDP", "GraphPPPartitionFSDPTest"),
    "GraphPPFSDPCollectiveSplitDsv3Test",
)
_OWN_PROCESSES = " or ".join(_STARTS_PROCESSES)
_ALONE = f"not ({_OWN_PROCESSES})"
# FlexAttention, expert parallelism, CUDA graphs, numbers of memory, what torch 2.15 lacks.
_WANTS_MEANS = (
    "FlexAttn or TestTraceModels or block_mask or real_dsv3 or SACPeak or precompile_vs_trace "
    "or PostProcessor or copies_only_shape"
)
_CUDA = ["--gt-cuda-as=cpu", "--gt-gpus=8"]


@dataclass(frozen=True, slots=True)
class Run:
    """Options of pytest, which tests, and which files: torchtitan's, or ours below a folder."""

    options: list[str]
    only: tuple[str, ...] = ("",)
    ours: bool = False
    select: str = ""


# "beside" is for tests/test_outcomes.py: the table needs no run of it.
RUNS = {
    "asis": Run(["-p", "no:gtrainer"]),
    "beside": Run([], select=_ALONE),
    "cuda": Run(
        _CUDA,
        ("trace_module", "precompile", "bitwise"),
        select=f"not ({_OWN_PROCESSES} or {_WANTS_MEANS})",
    ),
    "fake-tensors": Run(["--gt-gpus=8"], ("cpu_offload", "precompile"), ours=True),
    "means": Run(
        [*_CUDA, "-p", "means"],
        ("trace_module", "bitwise", "graph_pp_passes", "sac_peak", "profiler"),
        select=f"({_WANTS_MEANS}) and {_ALONE}",
    ),
    "worlds": Run(
        [*_CUDA, "--gt-timeout=1200"],
        ("passes", "numerics", "trace_module"),
        ours=True,
        select="not GraphTrainerNumerics",
    ),
    "twice": Run(_CUDA, ("bitwise",), ours=True, select="eager_self"),
    "saved": Run(_CUDA, ("bitwise",), ours=True, select="precompile"),
    "losses": Run(_CUDA, ("numerics",), ours=True, select="GraphTrainerNumerics"),
}
# Files that take longer than LIMIT, run in parts: of each, a part of the names of its tests.
PARTS = {
    "test_bitwise_deterministic.py": (
        *("Llama3Bit", "Llama3Flex", "DSv3Bit", "DSv3Flex", "Qwen3MoEBit", "Qwen3MoEFlex"),
    ),
    "test_numerics.py": (
        *("SimpleFSDP", "AutoParallel", "jit", "graph_pp", "dense_llama3_aot", "dense_qwen3"),
        *("moe_qwen3", "moe_dsv3_aot", "ep_overlap_aot", "moe_seq", "moe_batch"),
    ),
}


def folder() -> Path:
    """The folder of torchtitan's tests in the environment of this Python."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("torchtitan is not installed here: make test-torchtitan makes the place")
    return Path(spec.submodule_search_locations[0], "experiments", "graph_trainer", "tests")


def run_file(file: Path, out: Path, what: Run, part: str = "") -> dict[str, dict[str, object]]:
    """Run one file, or the tests of it whose names have a ``part``.

    ``out`` is a name: with ``.json`` and ``.log`` it is what the run writes. A run that dies or
    hangs is an outcome of the file.
    """
    select = " and ".join(f"({words})" for words in (what.select, part) if words)
    outcomes = out.with_name(f"{out.name}.json")
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir=.", "-q"]
    command += ["--confcutdir=.", "-p", "no:cacheprovider", "-p", "outcomes"]
    command += ["--tb=short", "--outcomes", str(outcomes), "-k", select, *what.options, str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        with out.with_name(f"{out.name}.log").open("w") as log:
            process = subprocess.run(
                command,
                cwd=HERE,
                env=environment,
                stdout=log,
                stderr=log,
                timeout=LIMIT,
                check=False,
            )
        if process.returncode == _NOTHING_SELECTED:
            return {}
        end = "no test was run"
    except subprocess.TimeoutExpired:
        end = f"not done in {LIMIT} s"
    found = json.loads(outcomes.read_text()) if outcomes.exists() else {}
    if not found or end.startswith("not done"):
        found[file.name] = {"outcome": "not collected", "reason": end, "seconds": 0.0}
    if file.name in found:
        # It could not be imported, or was cut off: that is the outcome of each test that has no other.
        outcome = found.pop(file.name)
        left = [name for name in tests_of(file) if part in name]
        found = dict.fromkeys(left, outcome) | found
    outcomes.unlink(missing_ok=True)
    return found


def tests_of(file: Path) -> list[str]:
    """The names of a file's tests, read in its source: of one that cannot be imported."""
    found = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found.append(f"{file.name}::{node.name}")
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name.startswith("test_"):
                    found.append(f"{file.name}::{node.name}::{inner.name}")
    return found


def run(name: str, out: Path, jobs: int) -> dict[str, dict]:
    """Do one of ``RUNS``, ``jobs`` files at a time; return the outcomes of all its files."""
    what = RUNS[name]
    folder_of_run = out / name
    folder_of_run.mkdir(parents=True, exist_ok=True)
    where = HERE / "on_worlds" if what.ours else folder()
    files = [
        file
        for file in sorted(where.glob("test_*.py"))
        if any(part in file.name for part in what.only)
    ]

    parts = [(file, part) for file in files for part in PARTS.get(file.name, ("",))]

    def outcomes_of(file_and_part: tuple[Path, str]) -> dict[str, dict]:
        file, part = file_and_part
        name = f"{file.stem}.{part}".removesuffix(".")
        kept = folder_of_run / f"{name}.json"
        if not kept.exists():
            found = run_file(file, folder_of_run / f"run.{name}", what, part)
            kept.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return json.loads(kept.read_text())

    found = {}
    with ThreadPoolExecutor(jobs) as pool:
        for outcomes in pool.map(outcomes_of, parts):
            found.update(outcomes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("-j", type=int, default=2, help="files at a time")
    parser.add_argument(
        "--run", nargs="*", default=[name for name in RUNS if name != "beside"], choices=list(RUNS)
    )
    given = parser.parse_args()
    for name in given.run:
        found = run(name, given.out.absolute(), given.j)
        counts = [
            f"{sum(each['outcome'] == outcome for each in found.values())} {outcome}"
            for outcome in ("passed", "failed", "skipped", "not collected")
        ]
        print(f"{name}: {', '.join(counts)}", flush=True)


if __name__ == "__main__":
    main()
