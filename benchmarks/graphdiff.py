"""What a failing golden of a 40,000-node graph costs: unfolding both texts, words, digest, lines.

    python -m benchmarks.graphdiff [--nodes 40000] [--rounds 3]

No torch is needed. Layers differ in their extents, so that no line is like another and nothing is
folded; each case begins with empty caches. A tenth of the nodes tells how the time grows.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence

from pytest_gtrainer.graphtext import dataflow, differences, equivalence, sections, syntax

LIMIT = 3.0
"""Seconds. It was 2 as long as collection of garbage was off meanwhile: code that nobody's diff
needed.
"""
_OPERATORS = ("mul", "add", "sub", "div", "maximum")


def graph(
    nodes: int, seed: int = 0, operators: tuple[str, ...] = _OPERATORS, layers: bool = True
) -> list[str]:
    """The lines of a graph: collectives and compute, in 100 layers or in one module only."""
    draw = random.Random(seed)
    lines = ["# gtrainer graph v2", "fsdp = group(range(0, 8))", "if I:", "  I[0]: f32[8]"]
    for layer in range(100):
        lines += [f"for i in P.layers[{layer}]:", f"  P.L.weight: f32[{layer + 1}, 8]"]
    per_layer = nodes // 100 - 2
    last, total = "I[0]", 0
    for layer in range(100):
        lines += [f"for i in fwd.layers[{layer}]:" if layers else "if fwd:"]
        weight = "P.L.weight" if layers else f"P.layers[{layer}].weight"
        kind = f"f32[{layer + 1}, 64]"
        number = "" if layers or not layer else f"_{layer}"
        lines += [
            f"  with {'bucket(L)' if layers else 'bucket(all)'}:",
            f"    all_gather_into_tensor{number}: {kind} = _c10d_functional.all_gather_into_tensor({weight}, 8, fsdp)",
            f"    wait_tensor{number}: {kind} = _c10d_functional.wait_tensor(all_gather_into_tensor{number})",
            f"  with {'L.mlp' if layers else 'mlp'}:",
        ]
        gathered = f"{'bucket(L)' if layers else 'bucket(all)'}.wait_tensor{number}"
        for step in range(per_layer):
            operator = draw.choice(operators)
            name = f"v{step if layers else total}"
            lines.append(
                f"    {name}: {kind} = aten.{operator}.Tensor({last}, {gathered}, alpha={draw.randrange(9)})"
            )
            last, total = name, total + 1
        last = f"layers[i-1].mlp.{last}" if layers else last
    return [
        *lines,
        "if out:",
        f"  loss = fwd.{last.replace('layers[i-1]', 'layers[99]') if layers else f'mlp.{last}'}",
    ]


def inserted(lines: list[str]) -> list[str]:
    """One more operator near the front of a module that holds everything: all names behind it are
    others.
    """
    place = next(number for number, line in enumerate(lines) if line.startswith("    v10:"))
    renumbered = [_shifted(line) for line in lines[place:]]
    return [*lines[:place], lines[place].replace(", alpha", ", 1.5, alpha"), *renumbered]


def _shifted(line: str) -> str:
    return re.sub(r"\bv(\d+)\b", lambda name: f"v{int(name[1]) + 1}", line)


def changed(lines: list[str], every: int) -> list[str]:
    """Another operator in each ``every``-th line."""
    return [
        line.replace("aten.", "prims.") if number % every == 0 else line
        for number, line in enumerate(lines)
    ]


def rescheduled(lines: list[str]) -> list[str]:
    """Each layer's launch stands at the end of the layer before."""
    moved = list(lines)
    launches = [number for number, line in enumerate(lines) if "all_gather_into_tensor: " in line]
    for number in reversed(launches[1:]):
        line = moved.pop(number).replace("P.L.", "P.layers[i+1].")
        moved[number - 2 : number - 2] = ["  with bucket(layers[i+1]):", line]
    return moved


def cases(nodes: int) -> Mapping[str, tuple[list[str], list[str]]]:
    one = graph(nodes)
    together = graph(nodes, layers=False)
    return {
        "every 10th operator": (one, changed(one, 10)),
        "every operator": (one, graph(nodes, seed=1)),
        "nothing in common": (one, graph(nodes, seed=1, operators=("sin", "cos"), layers=False)),
        "one operator inserted": (together, inserted(together)),
        "launches moved": (one, rescheduled(one)),
    }


def forget() -> None:
    """Empty the caches of what texts say."""
    for module in (dataflow, equivalence, sections, syntax):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def best(sides: Sequence[Sequence[str]], rounds: int) -> float:
    """CPU seconds of the quickest round: others use the machine, too."""
    old, new = ("\n".join(lines) for lines in sides)
    return min(_seconds(old, new) for _ in range(rounds))


def _seconds(old: str, new: str) -> float:
    forget()
    start = time.process_time()
    differences.diff(old, new)
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    few = options.nodes // 10
    small, met = cases(few), True
    for name, sides in cases(options.nodes).items():
        tenth, taken = best(small[name], options.rounds), best(sides, options.rounds)
        met &= taken <= LIMIT
        print(
            f"{name:<22} {few} nodes {tenth:5.2f} s, {options.nodes} nodes {taken:5.2f} s, "
            f"at most {LIMIT:g}: {'met' if taken <= LIMIT else 'MISSED'}, exponent {math.log10(taken / tenth):.2f}"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
