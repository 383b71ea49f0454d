"""A graph in other arithmetics against the same graph in floats, on all simulated ranks.

    python -m benchmarks.proofs [--ranks 8] [--rounds 3] [--layers 8 32 126] [--deepseek]
    python -m benchmarks.proofs --compile
    python -m benchmarks.proofs --same-model [--rounds 3]

CPU seconds on one thread, of the rewritten training step of Llama 3 in the debug flavor, ranks on
two nodes. Every run copies the graph and its inputs; a run in an arithmetic computes the real
numbers, too. One rank stands for all, beside all ranks.

``--layers`` proves instead that gathering again for the backward changes nothing, at these depths
and tiny widths: both runs, without the trace. Beside it stands a local change, a copy of one
product in the middle, of which only what is not shared runs.

``--compile`` proves instead every stage of torch.compile of ten models, and compares the seconds with
those of the compilation, without and with generated code.

``--same-model`` proves instead a parallel Llama 3 on 8 gloo ranks (2 x 2 x 2), and compares the
seconds of all ranks with those of one eager step of the same: building it, forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.paired import Goal, measure, report
from fixtures.models import llama3
from fixtures.ten_models import step, ten_models
from fixtures.training import deepseek_v3_training, llama3_training
from pytest_gtrainer import NetModel, Proof, gt_compile, prove, simulate_graph
from pytest_gtrainer.arithmetic.field import Field
from pytest_gtrainer.arithmetic.terms import Terms
from pytest_gtrainer.proofs import structure
from pytest_gtrainer.proofs.alike import OneRankForAll
from pytest_gtrainer.proofs.inputs import draw_inputs
from pytest_gtrainer.proofs.programs import GraphProgram
from pytest_gtrainer.references.graph import GraphRun
from pytest_gtrainer.worlds.fake import fake_world, make_mesh
from pytest_gtrainer.worlds.spec import make_spec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MOST_SECONDS, MOST_OF_A_CHANGE = 20, 1
GOALS = [Goal("field", "floats", 4), Goal("terms", "floats", 6)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=[])
    parser.add_argument("--deepseek", action="store_true", help="DeepSeek-V3 instead of Llama 3")
    parser.add_argument("--compile", action="store_true", help="stages of torch.compile")
    parser.add_argument("--same-model", action="store_true", help="assert_same_model on 8 ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.same_model:
        return 0 if report_same_model(options.rounds) else 1
    if options.compile:
        return 0 if report_compilations() else 1
    net = NetModel.of_world(options.ranks, nodes=2)
    with fake_world(make_spec("fake", size=options.ranks)) as world:
        if options.layers:
            return 0 if report_depths(options.layers, make_mesh(world), net) else 1
        training = deepseek_v3_training if options.deepseek else llama3_training
        gm = GraphRun(training(make_mesh(world), "bf16_fp32")).traced.gm
        inputs = [draw_inputs(gm, rank) for rank in range(options.ranks)]
        program = GraphProgram(gm, inputs, net, by_place=False)
        one = OneRankForAll(program)
        contestants = {
            "floats": lambda: simulate_graph(gm, inputs, net),
            "field": lambda: one.run(Field(casts="opaque")),
            "terms": lambda: one.run(Terms(strict=True)),
            "field, all ranks": lambda: program.run(Field(casts="opaque")),
            "terms, all ranks": lambda: program.run(Terms(strict=True)),
        }
        print(f"{len(gm.graph.nodes)} nodes on {options.ranks} ranks")
        times = measure(contestants, options.rounds)
    return 0 if report(times, None, GOALS) else 1


ON_RANKS = """
import json, time

import pytest
import torch
import torch.distributed as dist

from fixtures.combinations import Combination
from fixtures.models.loss import ce_step
from pytest_gtrainer import assert_same_model

RIGHT = Combination({{"dp": 2, "cp": 2, "tp": 2}})

def seconds(function):
    begin = time.process_time()
    function()
    spent = torch.tensor(time.process_time() - begin)
    dist.all_reduce(spent)
    return float(spent)

@pytest.mark.gt_world("ranks", size=8, mesh=RIGHT.mesh)
def test_in_turns(gt_mesh):
    torch.set_num_threads(1)

    def step():
        model, step = RIGHT.parallel(gt_mesh)
        step(model, *RIGHT.batch(gt_mesh.get_local_rank("dp"))).backward()

    def proof():
        options = RIGHT.options(gt_mesh)
        assert_same_model(RIGHT.parallel, RIGHT.reference, ce_step, RIGHT.batch, **options)

    for _ in range({rounds} + 1):
        times = {{"step": seconds(step), "proof": seconds(proof)}}
        if dist.get_rank() == 0:
            with open("seconds", "a") as file:
                print(json.dumps(times), file=file)
"""


def report_same_model(rounds: int) -> bool:
    """Print the seconds of a proof and of a step on 8 ranks; whether a proof takes 8 times that."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_in_turns.py").write_text(ON_RANKS.format(rounds=rounds))
        command = [sys.executable, "-m", "pytest", "-q", "--gt-gpus=8", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        subprocess.run([*command, "--gt-timeout=600"], cwd=folder, env=environment, check=True)
        lines = Path(folder, "seconds").read_text().splitlines()
    runs = list(map(json.loads, lines))[1:]
    times = {name: statistics.median(run[name] for run in runs) for name in ("step", "proof")}
    return report(times, None, [Goal("proof", "step", 8)])


def report_compilations() -> bool:
    """Print the seconds of compiling and of proving; whether proofs take twice as long at most."""
    totals = {"graphs": 0.0, "code": 0.0, "proof": 0.0}
    for name, (model, inputs) in ten_models().items():
        seconds = {}
        for kind, lower in (("code", True), ("graphs", False)):
            start = time.process_time()
            with gt_compile(lower=lower) as record:
                step(torch.compile(model), inputs)
            seconds[kind] = time.process_time() - start
        start = time.process_time()
        proof = record.prove()
        seconds["proof"] = time.process_time() - start
        for kind, each in seconds.items():
            totals[kind] += each
        shown = ", ".join(f"{kind} {each:5.2f} s" for kind, each in seconds.items())
        print(f"{name:18} {shown}: {len(proof.stages)} stages, {proof.kind}")
    shown = ", ".join(f"{kind} {each:5.2f} s" for kind, each in totals.items())
    print(f"all: {shown}; {totals['proof'] / totals['graphs']:.1f} times the passes alone")
    return totals["proof"] <= 2 * totals["graphs"]


def report_depths(depths: list[int], mesh: DeviceMesh, net: NetModel) -> bool:
    """Print the seconds of a proof at each depth; whether the deepest takes at most 20."""
    seconds = []
    for depth in depths:
        llama3.FLAVORS["tiny"] = replace(
            llama3.FLAVORS["debug"], dim=16, ffn_dim=32, vocab_size=32, n_layers=depth
        )
        config = llama3_training(mesh, "bf16_fp32", "tiny")
        run = GraphRun(config)
        actual, expected = run.rewritten(reshard_after_forward=True).traced.gm, run.traced.gm
        changed = with_a_copy(expected)
        fewest, structure.FEWEST_NODES = structure.FEWEST_NODES, sys.maxsize
        whole, proof = timed_proof(actual, expected, net)
        structure.FEWEST_NODES = fewest
        local, of_change = timed_proof(changed, expected, net)
        seconds.append((whole, local))
        nodes = len(actual.graph.nodes) + len(expected.graph.nodes)
        print(f"{depth:4} layers, {nodes:6} nodes of both: {whole:6.2f} s, {proof.kind}")
        print(f"{'':11} a local change: {local:6.2f} s, {of_change.kind}")
        assert proof.kind == of_change.kind == "identical", str(proof)
    whole, local = seconds[-1]
    return whole <= MOST_SECONDS and local <= MOST_OF_A_CHANGE


def with_a_copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a graph in which one product in the middle is copied."""
    changed = copy.deepcopy(gm)
    products = changed.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    product = products[len(products) // 2]
    with changed.graph.inserting_after(product):
        copied = changed.graph.call_function(torch.ops.aten.clone.default, (product,))
    copied.meta["val"] = product.meta["val"]
    product.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
    return changed


def timed_proof(
    actual: torch.fx.GraphModule, expected: torch.fx.GraphModule, net: NetModel
) -> tuple[float, Proof]:
    start = time.process_time()
    proof = prove(actual, expected, world=net)
    return time.process_time() - start, proof


if __name__ == "__main__":
    sys.exit(main())
