"""Graph text at several depths: rendering, parsing and checking against torch's own ways of the
same kind.

    python -m benchmarks.graphtext [--layers 8 32 64 126] [--rounds 5]

Llama 3 (debug) with sharded parameters, traced under a fake world of 8 and rewritten by the default
passes. Everyone works on the same graph, in turns, with garbage collection off; times are CPU
seconds, medians.

- rendering against ``gm.print_readable(print_output=False)``;
- parsing, without recompile, against ``copy.deepcopy(gm)``;
- checking against rendering: a golden check of an equal graph renders it, reads the file and
  compares. Three goldens: the same text; one with another header; one told without folding, so that
  lines are compared.

The exponent is of a power of the number of nodes, fitted over all depths.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import fx

from benchmarks.paired import Goal, measure, report
from benchmarks.passes import MAX_EXPONENT, collection_frozen, exponent, traced
from pytest_gtrainer import apply_graph_passes, construct_default_graph_passes
from pytest_gtrainer.golden import store
from pytest_gtrainer.golden.compare import judge
from pytest_gtrainer.graphtext import render, unfold
from pytest_gtrainer.graphtext.parsing import parser_of
from pytest_gtrainer.worlds.fake import fake_world
from pytest_gtrainer.worlds.spec import make_spec

RENDER, PARSE = "render", "parse, without recompile"
PRINT, COPY = "print_readable", "copy.deepcopy"
CHECKS = SAME, OTHER_HEADER, UNFOLDED = (
    "check, same text",
    "check, other header",
    "check, golden not folded",
)
GOALS = [
    Goal(RENDER, PRINT, 0.9),
    Goal(PARSE, COPY, 1.4),
    *(Goal(check, RENDER, 1.5) for check in CHECKS),
]
"""0.3, 0.7 and 1.2 once, with caches and fast paths: a graph of 10,000 nodes is rendered in 0.2 s
without, which nobody notices.
"""
OURS = (RENDER, PARSE, *CHECKS)

Contestant = Callable[[], object]


def rewritten(n_layers: int) -> fx.GraphModule:
    """The joint graph, bucketed and reordered."""
    with fake_world(make_spec("fake", size=8)) as world:
        return apply_graph_passes(
            traced(n_layers, world), None, construct_default_graph_passes(n_layers=n_layers)
        )


def contestants(gm: fx.GraphModule, folder: Path) -> Mapping[str, Contestant]:
    """Everyone, working on one graph; goldens go to ``folder``."""
    text = render(gm, header=_HEADER)
    goldens = {
        SAME: text,
        OTHER_HEADER: text.replace("# torch: 2", "# torch: 1"),
        UNFOLDED: not_folded(text),
    }
    return {
        RENDER: lambda: render(gm),
        PRINT: lambda: gm.print_readable(print_output=False),
        PARSE: lambda: parser_of(text),
        COPY: lambda: copy.deepcopy(gm),
        **{
            name: check_of(gm, folder / f"{place}.fxgraph", folder, goldens[name])
            for place, name in enumerate(CHECKS)
        },
    }


_HEADER = {"test": "tests/test_step.py::test_step", "torch": "2.13.0"}


def check_of(gm: fx.GraphModule, path: Path, root: Path, golden: str) -> Contestant:
    """A golden check of a graph, from the rendering to the verdict."""
    store.write(path, root, golden)

    def check() -> None:
        obtained, found = render(gm, header=_HEADER), store.read(path, root)
        assert found is not None
        assert judge("graph", found, obtained).outcome == "equal"

    return check


def not_folded(text: str) -> str:
    """The same graph with every layer told in full."""
    lines = [line for line in text.splitlines() if line.startswith("#")]
    section = None
    for line in unfold(text):
        if line.section != section and line.section:
            lines.append(
                f"if {line.section}:" if "[" not in line.section else f"for i in {line.section}:"
            )
        indent = "  " * bool(line.section)
        lines += [f"{indent}with {line.heading}:"] * bool(line.heading)
        lines.append(indent + "  " * bool(line.heading) + line.text)
        section = line.section
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 64, 126])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes, times = [], []
    for n_layers in options.layers:
        gm = rewritten(n_layers)
        with tempfile.TemporaryDirectory() as folder:
            everyone = contestants(gm, Path(folder))
            with collection_frozen():
                times.append(measure(everyone, options.rounds))
        sizes.append(len(gm.graph.nodes))
        print(f"-- {n_layers} layers, {sizes[-1]} nodes, {len(render(gm).splitlines())} lines")
        met = report(
            times[-1], None, GOALS
        )  # the deepest one counts: a small graph is mostly caches and files
    return 0 if grows_linearly(sizes, times) and met else 1


def grows_linearly(sizes: list[int], times: list[dict[str, float]]) -> bool:
    """Print how times grow; whether ours grow as the limit allows."""
    met = True
    for name in times[0] if len(sizes) > 1 else ():
        slope = exponent(sizes, [found[name] for found in times])
        verdict = (
            ""
            if name not in OURS
            else f", at most {MAX_EXPONENT}: {'MISSED' if slope > MAX_EXPONENT else 'met'}"
        )
        met &= name not in OURS or slope <= MAX_EXPONENT
        print(f"{name:<28} exponent {slope:.2f}{verdict}")
    return met


if __name__ == "__main__":
    sys.exit(main())
