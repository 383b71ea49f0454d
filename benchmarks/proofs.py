"""A graph in other arithmetics against the same graph in floats, on all simulated ranks.

    python -m benchmarks.proofs [--ranks 8] [--rounds 3]

CPU seconds on one thread, of the rewritten training step of Llama 3 in the debug flavor, ranks on
two nodes. Every run copies the graph and its inputs; a run in an arithmetic computes the real
numbers, too.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.paired import Goal, measure, report
from fixtures.training import llama3_training
from pytest_gtrainer import NetModel, simulate_graph
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.terms import Terms
from pytest_gtrainer.proofs.inputs import draw_inputs
from pytest_gtrainer.proofs.programs import GraphProgram
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.spec import make_spec

GOALS = [Goal("field", "floats", 4), Goal("terms", "floats", 6)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fake_world(make_spec("fake", size=options.ranks)) as world:
        gm = GraphRun(llama3_training(make_mesh(world), "bf16_fp32")).traced.gm
        net = NetModel.of_world(options.ranks, nodes=2)
        inputs = [draw_inputs(gm, rank) for rank in range(options.ranks)]
        program = GraphProgram(gm, inputs, net, by_place=False)
        contestants = {
            "floats": lambda: simulate_graph(gm, inputs, net),
            "field": lambda: program.run(Field(casts="opaque")),
            "terms": lambda: program.run(Terms(strict=True)),
        }
        print(f"{len(gm.graph.nodes)} nodes on {options.ranks} ranks")
        times = measure(contestants, options.rounds)
    return 0 if report(times, None, GOALS) else 1


if __name__ == "__main__":
    sys.exit(main())
