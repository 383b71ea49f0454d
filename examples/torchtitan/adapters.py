"""torchtitan's passes as ``pytest_gtrainer.conformance`` takes them; the README has their table."""

from types import SimpleNamespace

from debug_models import on_cpu
from torchtitan.experiments.graph_trainer import cpu_offload, fsdp_passes, memory_policy
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
from torchtitan.experiments.graph_trainer.remove_noop_passes import (
    canonicalize_graph_pass,
    eliminate_dead_code_pass,
)
from torchtitan.experiments.graph_trainer.selective_activation_remat import (
    selective_activation_remat_pass,
)

from pytest_gtrainer.conformance import Adapter


def joint_bucketing(gm, plan):
    """Bucket and reorder as torchtitan's trainer does, whose tracer knows the parameters' order."""
    inputs = [node.meta.get("gt_input", {}) for node in gm.graph.find_nodes(op="placeholder")]
    parameters = [each["fqn"] for each in inputs if each.get("kind") == "parameter"]
    with on_cpu():
        return fsdp_passes.joint_transformer_block_bucketing_reordering_pass(
            gm,
            module_bucket_plans=plan,
            fsdp_param_module_order=fsdp_passes.get_fsdp_param_module_order(parameters),
        )


def dense_regions(gm, plan):
    """Bucket, and launch collectives where attention computes."""
    gm = joint_bucketing(gm, plan)
    layers = {name.split(".")[1] for name in plan if name[:7] == "layers."}
    return fsdp_passes.schedule_fsdp_comms_to_dense_regions_pass(
        gm, moe_layer_ids=frozenset(), n_layers=len(layers)
    )


class WithPolicy:
    """A pass that tags as a memory policy says, and recomputes what is tagged.

    A class, as another process can import one, and no function inside of another.
    """

    def __init__(self, policy):
        self.__name__ = f"memory_policy_{policy}"
        self.config = SimpleNamespace(
            compile=GraphTrainerCompileConfig(enable=True, memory_policy=policy),
            parallelism=SimpleNamespace(
                fsdp_reshard_after_forward="always", pipeline_parallel_degree=1
            ),
        )

    def __call__(self, gm):
        with on_cpu():
            gm = memory_policy.tag_with_memory_policy_pass(gm, config=self.config)
        return selective_activation_remat_pass(gm)


def offload(gm):
    """Move all activations to the CPU and back, small ones too."""
    smallest = cpu_offload._MIN_OFFLOAD_BYTES
    cpu_offload._MIN_OFFLOAD_BYTES = 0
    try:
        return cpu_offload.apply_cpu_offload_pass(cpu_offload.tag_all_offloadable_activations(gm))
    finally:
        cpu_offload._MIN_OFFLOAD_BYTES = smallest


FAULT = "a fault: tests/test_faults.py"
ON_GPUS = "operators of an offload use streams of a GPU"
RECOMPUTES = {
    "E7": "tags stay, and a second run acts on them",
    "p2p": "a message that is received would be recomputed: GraphPP has none in its graphs",
    "written": FAULT,
}
# What D11 gives them is no reason to: they take no plan, and move neither values nor draws.
REFUSES_NONE = {"D11": "it refuses no graph: its code raises no error"}
RANDOM = {"D11": "tags stay behind a refusal of random numbers"}

deduplicate = Adapter(
    fsdp_passes.deduplicate_fsdp_unshard_chains_pass,
    "deduplication",
    broken={
        "A11": "it runs before recomputation, so gathers of the backward are one with the forward's",
        "written": FAULT,
    },
    not_claimed=REFUSES_NONE,
)
reassign = Adapter(
    fsdp_passes.reassign_collective_pgs_pass,
    "reassignment",
    broken={"F1": FAULT, "F4": FAULT, "order": FAULT, "p2p": FAULT},
    not_claimed=REFUSES_NONE,
)
canonicalize = Adapter(
    canonicalize_graph_pass,
    "canonicalisation",
    broken={"spelling": "two transpose(0, 1) in a row stay: the pass looks for aten.t"},
    not_claimed=REFUSES_NONE,
)
dead_code = Adapter(eliminate_dead_code_pass)
remat = Adapter(selective_activation_remat_pass, "remat", broken={**RECOMPUTES, "process": FAULT})
policy_default = Adapter(WithPolicy("default"), "memory_policy", broken={**RECOMPUTES, **RANDOM})
policy_full = Adapter(WithPolicy("full"), "memory_policy", broken=RECOMPUTES)
policy_eager = Adapter(WithPolicy("eager"), "memory_policy", broken={**RECOMPUTES, **RANDOM})
offload_all = Adapter(
    offload,
    broken={"E7": "a second run offloads what was offloaded"},
    not_claimed={
        **REFUSES_NONE,
        **dict.fromkeys(("D9", "metadata", "fresh", "generated"), ON_GPUS),
    },
)
# Each of these two takes minutes, so tests/test_conformance.py leaves them out.
joint = Adapter(joint_bucketing, "bucketing", call=joint_bucketing)
dense = Adapter(dense_regions, "bucketing", call=dense_regions)
