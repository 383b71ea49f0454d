"""Hashes of weights after each step: graph_trainer's graph against eager FSDP2, on one node and on two.

torchtitan compared such hashes on 64 GPUs and more in pull requests 3590 and 3770: several nodes add
in another order where a graph packs a bucket otherwise than FSDP2. Here the nodes are simulated.
"""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

import torch
from debug_models import BATCH, LENGTH, DebugModel, names_of_inputs, on_cpu
from torchtitan.experiments.graph_trainer import common_utils, passes

from pytest_gtrainer import NetModel, Rule, Sweep, digest, simulate_eager, simulate_graph

RANKS, STEPS, RATE = 4, 2, 0.1
REGISTRATION, EXECUTION, OUTSIDE = "as registered", "as executed", "head outside"
SWEEP = Sweep(
    "hashes of weights",
    axes={"payload": (REGISTRATION, EXECUTION, OUTSIDE), "nodes": (1, 2)},
    rules=[
        Rule("equal", {"payload": REGISTRATION}, to="eager FSDP2"),
        Rule("equal", {"nodes": 1}, to="eager FSDP2: all channels of one node add in one order"),
        Rule("different", {"payload": EXECUTION}, reason="pull request 3590"),
        Rule("different", {"payload": OUTSIDE}, reason="pull request 3770"),
    ],
)


def lab():
    return DebugModel("llama3", data_parallel_shard_degree=RANKS)


def graph_of(payload, monkeypatch):
    """Return what torchtitan traces, with a mistake put back, and the names of its inputs."""
    plan_of = common_utils.get_default_transformer_block_buckets

    def with_head_outside(layers, **options):
        (*others, _) = plan_of(layers, **options)
        return [*others, "norm", "lm_head"]

    with monkeypatch.context() as patch:
        if payload == EXECUTION:
            patch.setattr(passes, "get_fsdp_param_module_order", lambda names: {})
        if payload == OUTSIDE:
            name = "get_default_transformer_block_buckets"
            patch.setattr(common_utils, name, with_head_outside)
        own = lab()
        trainer = own.trainer(is_graph=True)
        own.step(trainer, 0)
    return with_tensors_alone(trainer._traced_step)


def with_tensors_alone(traced):
    """Leave the meshes out, of inputs and outputs: a DTensor is its shard and its mesh."""
    names = names_of_inputs(traced)
    gm = traced.gm
    output = gm.graph.output_node()
    output.args = ([each for each in output.args[0] if is_tensor(each)],)
    inputs = []
    for node in gm.graph.find_nodes(op="placeholder"):
        if is_tensor(node):
            inputs.append(names[node.name])
        else:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm, inputs


def is_tensor(node):
    return isinstance(node.meta.get("val"), torch.Tensor)


def descend(gradients_of):
    """Return a hash of the weights of all ranks after each step."""
    model = lab().unsharded()
    shards = {name: parameter.detach().chunk(RANKS) for name, parameter in model.named_parameters()}
    weights = [
        {name: parts[rank].clone() for name, parts in shards.items()} for rank in range(RANKS)
    ]
    found = []
    for step in range(STEPS):
        for own, gradients in zip(weights, gradients_of(step, weights), strict=True):
            for name, weight in own.items():
                weight -= RATE * gradients[name]
        found.append(
            digest(
                {f"{rank} {name}": own[name] for rank, own in enumerate(weights) for name in own}
            )
        )
    return found


def gradients_of_graph(gm, inputs, net):
    buffers = dict(lab().unsharded().named_buffers())

    def gradients_of(step, weights):
        given = []
        for rank, own in enumerate(weights):
            tokens, labels = lab().batch_of(step, rank)
            values = {
                **{name: tensor.clone() for name, tensor in {**buffers, **own}.items()},
                **{"tokens": tokens, "labels": labels},
                "valid_tokens": torch.tensor(float(RANKS * tokens.numel())),
                "positions": torch.arange(LENGTH, dtype=torch.int32).repeat(BATCH, 1),
            }
            given.append([values[name] for name in inputs])
        return simulate_graph(gm, given, net, outputs=["loss", *weights[0]])

    return gradients_of


def gradients_of_eager(net):
    def gradients_of(step, weights):
        def train(rank):
            own = lab()
            trainer = own.trainer(is_graph=False)
            parameters = dict(trainer.model_parts[0].named_parameters())
            for name, parameter in parameters.items():
                parameter.detach().to_local().copy_(weights[rank][name])
            own.step(trainer, step)
            return {name: each.grad.to_local() for name, each in parameters.items()}

        return simulate_eager(train, [(rank,) for rank in range(RANKS)], net)

    return gradients_of


@pytest.mark.gt_world("simulated", size=RANKS)
def test_hashes_of_weights(gt_world, gt_deterministic, monkeypatch):
    nets = {nodes: NetModel.of_world(RANKS, nodes=nodes) for nodes in SWEEP.axes["nodes"]}
    with on_cpu():
        eager = {nodes: descend(gradients_of_eager(net)) for nodes, net in nets.items()}
        graphs = {payload: graph_of(payload, monkeypatch) for payload in SWEEP.axes["payload"]}
        for cell in SWEEP.cells:
            net = nets[cell["nodes"]]
            found = descend(gradients_of_graph(*graphs[cell["payload"]], net))
            with SWEEP.judging(cell) as judge:
                judge(as_tensor(found), as_tensor(eager[cell["nodes"]]))


def as_tensor(hashes):
    """Return hashes as a tensor, a row for each step."""
    return torch.tensor([list(each.encode()) for each in hashes])
