"""Write TABLE.md: each test of torchtitan's graph_trainer, as is, by which means, or blocked by what.

    python table.py DIR

``DIR`` is what ``upstream.py`` wrote: a folder for each of ``RUNS``, which say what was on in it.
Where it lacks the run by which a test passed, the row of TABLE.md as it stands is kept, and counted.
"""

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
AS_IS = "as is"
RUNS = {
    "asis": AS_IS,
    "cuda": "`--gt-cuda-as=cpu`",
    "fake-tensors": "`gt_fake_tensors`",
    "means": "`-p means`",
    "worlds": "`gt_world` and `-p means`",
    "twice": "`-p means`, twice",
    "saved": "`-p means`, past its skip",
    "losses": "`companions/scripts`",
}
ROW = re.compile(r"\| `(.+)` \| (.*) \| (.*) \| (.*) \|")
# Their world_size is min(device_count(), 4): without a GPU they start no process, and pass.
OF_NO_RANK = re.compile("::(TestTraceFSDP|TestAutogradGradVsBackwardFSDP)::")
# What torchtitan skips under every condition, or in the body of a test.
BY_ITSELF = "skipped by torchtitan: "
# The first that matches the reason of a test that no run let pass.
BLOCKS = (
    (
        "test_moe_(dsv3|qwen3)_aot_fx",
        "in bfloat16 losses part; in float64 a cast is lost: README.md",
    ),
    ("#2149", f"{BY_ITSELF}its jit mode is switched off (#2149)"),
    ("FlexAttn.*::test_precompile", f"{BY_ITSELF}FlexAttention's masks cannot be pickled"),
    ("test_gpt_oss", f"{BY_ITSELF}its GPT-OSS adds one dtype to another"),
    ("golden hashes", f"{BY_ITSELF}the expected numbers are of one kind of GPU"),
    ("flaky", f"{BY_ITSELF}NCCL's all-to-all crashes, or has no fixed order"),
    ("upstream AutoParallel", "autoparallel, which is on no index, and torchtitan skips it too"),
    (
        "FlexAttention|max scores|flex_attention",
        "FlexAttention, not run to its end with the dense formula",
    ),
    ("_annotate_cuda_graph_trace", "a module that torch 2.15 lacks"),
    (
        "TestGraphTrainerNumerics|integration_tests'|scripts",
        "scripts and tests of the repository that the wheel lacks",
    ),
    ("sharding strategy", "torch: the CPU's attention has no strategy of context parallelism"),
    ("assets/tokenizer", "a tokenizer of the repository that the wheel lacks"),
    ("pre-Hopper|sm_90|H100", "the numbers or kernels of one kind of GPU"),
    ("copies_only_shape", "torch 2.15's mark_dynamic notes no range where none is given"),
    ("autoparallel", "autoparallel, which is not on the index"),
    ("cudaGraphNodeGetToolsId", "CUDA's driver, whose names of nodes it reads"),
    ("CUDA required|nan not less than", "numbers of a GPU's memory"),
    ("CUDA not available", "nothing known: not run to its end with a means"),
    ("get_device_name", "torch.cpu has no get_device_name, which its metrics call"),
    ("support only expert parallel", "its own check of CUDA graphs"),
    ("no stand-in|CUDAGraph|cudaGraph", "streams, CUDA graphs or memory statistics"),
    ("!= 'cuda'|cuda", "the CPU is not named cuda"),
)


def blocked_by(reason: str) -> str:
    """Return the group of a reason; the reason itself, shortened, if it has none.

    >>> blocked_by("ModuleNotFoundError: No module named 'scripts'")
    'scripts and tests of the repository that the wheel lacks'
    """
    for pattern, group in BLOCKS:
        if re.search(pattern, reason):
            return group
    return reason.replace("|", "/").partition(" in test_")[0][:90] or "no reason was given"


def rows(runs: dict[str, dict[str, dict]]) -> list[tuple[str, str, str, str]]:
    """Return name, outcome as is, means and block of each test; ``runs`` has the outcomes by run."""
    # test_passes.py imports this class, so pytest finds it in two files.
    twice = "test_passes.py::TestCpuOffloadPass"
    names = sorted({name for run in runs.values() for name in run if not name.startswith(twice)})
    found = []
    for name in names:
        outcomes = {RUNS[run]: runs[run][name] for run in RUNS if name in runs.get(run, {})}
        as_is = outcomes.get(AS_IS, {"outcome": "not run", "reason": ""})["outcome"]
        if as_is == "passed" and OF_NO_RANK.search(name):
            as_is = "passed, on 0 ranks"
            del outcomes[AS_IS]
        passed = [means for means, each in outcomes.items() if each["outcome"] == "passed"]
        if passed:
            found.append((name, as_is, "" if passed[0] == AS_IS else passed[0], ""))
        else:
            # The last run came furthest, so it names what is still in the way. A skip that torchtitan
            # writes without a condition stays one.
            groups = [blocked_by(f"{each['reason']} in {name}") for each in outcomes.values()]
            own = [group for group in groups if group.startswith(BY_ITSELF)]
            found.append((name, as_is, "", (own or groups)[-1]))
    return found


def merged(
    found: list[tuple[str, str, str, str]],
    before: list[tuple[str, str, str, str]],
    runs: dict[str, dict[str, dict]],
) -> tuple[list[tuple[str, str, str, str]], int]:
    """Return the rows, some from the table ``before``, and how many those are.

    A row is kept if its test did not pass now, and ``runs`` lacks the run by which it passed.
    """
    by_name = {row[0]: row for row in found}
    kept = 0
    for name, as_is, means, block in before:
        new = by_name.get(name)
        ran_as_is = name in runs.get("asis", {})
        passed_by = next(run for run in RUNS if RUNS[run] == (means or AS_IS))
        passed_before = not block and name not in runs.get(passed_by, {})
        passes_now = new is not None and (new[2] or new[1] == "passed")
        if new is None or (passed_before and (as_is == "passed" or not passes_now)):
            by_name[name] = (name, as_is, means, block)
            kept += 1
        elif not ran_as_is:
            by_name[name] = (name, as_is, *new[2:])
    return [by_name[name] for name in sorted(by_name)], kept


def text(found: list[tuple[str, str, str, str]], kept: int = 0) -> str:
    as_is = sum(row[1] == "passed" for row in found)
    by_means: dict[str, int] = {}
    blocked: dict[str, int] = {}
    for _, was, means, block in found:
        if means:
            by_means[means] = by_means.get(means, 0) + 1
        elif was != "passed":
            blocked[block] = blocked.get(block, 0) + 1
    passed = as_is + sum(by_means.values())
    lines = ["# torchtitan 0.3.0: its graph_trainer's tests on a CPU", ""]
    lines += [f"**{passed} of {len(found)} pass.** `python table.py` wrote this from runs.", ""]
    if kept:
        lines += [f"{kept} rows are of the runs before.", ""]
    lines += ["| tests | |", "|---|---|", f"| {as_is} | pass as they are |"]
    for means, count in sorted(by_means.items(), key=lambda each: -each[1]):
        lines.append(f"| {count} | pass by {means} |")
    for block, count in sorted(blocked.items(), key=lambda each: -each[1]):
        lines.append(f"| {count} | blocked: {block} |")
    lines += ["", "| test | as is | passes by | blocked by |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {was} | {means} | {block} |" for name, was, means, block in found]
    return "\n".join(lines) + "\n"


def main() -> None:
    folder = Path(sys.argv[1])
    runs = {}
    for run in RUNS:
        runs[run] = {}
        for file in sorted((folder / run).glob("test_*.json")):
            runs[run].update(json.loads(file.read_text()))
    if not any(runs.values()):
        raise SystemExit(f"{folder} has no outcomes: run upstream.py first")
    table = HERE / "TABLE.md"
    before = ROW.findall(table.read_text()) if table.exists() else []
    found, kept = merged(rows(runs), before, runs)
    table.write_text(text(found, kept))


if __name__ == "__main__":
    main()
