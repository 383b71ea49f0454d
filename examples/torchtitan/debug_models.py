"""torchtitan's debug models on CPU ranks: its own parallelize, its own trainers, a few steps."""

from contextlib import ExitStack, contextmanager
from functools import cached_property
from unittest import mock

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.experiments.graph_trainer import memory_policy
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
from torchtitan.experiments.graph_trainer.deepseek_v3 import model_registry as deepseek_v3
from torchtitan.experiments.graph_trainer.llama3 import model_registry as llama3
from torchtitan.experiments.graph_trainer.qwen3 import model_registry as qwen3
from torchtitan.experiments.graph_trainer.tests._trainer_test_utils import build_minimal_trainer
from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
from torchtitan.models.deepseek_v3.parallelize import parallelize_deepseekv3
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.trainer import Trainer

BATCH, LENGTH, LAYERS = 2, 16, 2
# By name: graph_trainer's registry of models, the flavour in it, and parallelize of eager torchtitan.
MODELS = {
    "llama3": (llama3, "debugmodel", parallelize_llama),
    "deepseek_v3": (deepseek_v3, "debugmodel", parallelize_deepseekv3),
    "qwen3": (qwen3, "debugmodel", parallelize_qwen3),
    "qwen3_moe": (qwen3, "debugmodel_moe", parallelize_qwen3),
}
# What an estimate of run times divides by; any device would do.
_SPEEDS = ("get_gpu_dram_gbps", "get_device_tflops")


@contextmanager
def on_cpu():
    """Set what torchtitan knows of GPUs only.

    Its memory policy keeps the results of CUDA's attention, by name; its schedules ask how fast the
    GPU is.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    save_ops = memory_policy._get_default_save_ops
    import torch._inductor.utils as inductor_utils
    import torch.utils._runtime_estimation as estimation

    def keeps_flash():
        return {*save_ops(), flash}

    def speed(*args, **kwargs):
        return 100

    with ExitStack() as stack:
        patch = mock.patch.object(memory_policy, "_get_default_save_ops", keeps_flash)
        stack.enter_context(patch)
        for module in (inductor_utils, estimation):
            for name in _SPEEDS:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, speed))
        yield


def names_of_inputs(traced):
    """Return the names of a trace's inputs, which torchtitan's tracer knows in their order.

    A parameter is a DTensor, and so two inputs: its shard, then its mesh. What belongs to the mask
    comes behind the four tensors of a batch.
    """
    batch = ["tokens", "labels", "valid_tokens", "positions"]
    known = iter([*traced.state_fqns, *batch, *(f"mask.{place}" for place in range(100))])
    names = {}
    name = ""
    for node in traced.gm.graph.find_nodes(op="placeholder"):
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        name = next(known) if is_tensor else f"{name}.mesh"
        names[node.name] = name
    return names


class DebugModel:
    """A debug model of torchtitan with two layers, under one parallelism."""

    def __init__(self, name, **parallelism):
        registry, flavour, self.eager_parallelize = MODELS[name]
        self.spec = registry(flavour, attn_backend="sdpa")
        self.spec.model.layers = self.spec.model.layers[:LAYERS]
        self.parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **parallelism)
        self.training = TrainingConfig(
            local_batch_size=BATCH,
            seq_len=LENGTH,
            steps=3,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
        )
        dist_utils.set_spmd_backend("partial_dtensor")
        self.spec.model.update_from_config(
            config=Trainer.Config(
                model_spec=self.spec,
                training=self.training,
                parallelism=self.parallelism,
                checkpoint=CheckpointManager.Config(initial_load_model_only=False),
                debug=DebugConfig(seed=42, deterministic=True),
            )
        )

    @cached_property
    def dims(self):
        return ParallelDims.from_config(self.parallelism, dist.get_world_size())

    def unsharded(self):
        """The model before anything is parallel, the same on all ranks."""
        with torch.device("meta"):
            model = self.spec.model.build()
        model.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(42)
            model.init_states(buffer_device=None)
        return model

    def parallel(self, compile_config=None):
        """The model by torchtitan's parallelize: FSDP2's, or with ``compile_config`` graph_trainer's."""
        is_graph = compile_config is not None
        parallelize = self.spec.parallelize_fn if is_graph else self.eager_parallelize
        model = parallelize(
            self.unsharded(),
            parallel_dims=self.dims,
            training=self.training,
            parallelism=self.parallelism,
            compile_config=compile_config or CompileConfig(enable=False),
            ac_config=None,
            dump_folder="dump",
        )
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                # FSDP2's other way to take a mean is an operation that only NCCL has.
                module.set_force_sum_reduction_for_comms(True)
        return model.train()

    def batch(self, step):
        """Tokens and labels of this rank's coordinate of data."""
        rank = self.dims.get_mesh("batch").get_local_rank() if self.dims.dp_enabled else 0
        return self.batch_of(step, rank)

    def batch_of(self, step, rank):
        generator = torch.Generator().manual_seed(100 * step + rank)
        vocabulary = self.spec.model.vocab_size
        tokens, labels = torch.randint(0, vocabulary, (2, BATCH, LENGTH), generator=generator)
        return tokens, labels

    def trainer(self, is_graph, **options):
        """A trainer of torchtitan's, ``GraphTrainer`` or the eager one."""
        options = {"disable_passes": ["cudagraph_pass"], **options}
        compile_config = GraphTrainerCompileConfig(enable=True, mode="aot_fx_trace", **options)
        model = self.parallel(compile_config if is_graph else None)
        trainer = build_minimal_trainer(
            model, self.spec.model, GraphTrainer if is_graph else Trainer
        )
        trainer.device = torch.device("cpu")
        trainer.parallel_dims = self.dims
        trainer.config.parallelism = self.parallelism
        trainer.config.compile = compile_config
        trainer.train_context = dist_utils.get_spmd_context(parallel_dims=self.dims)
        trainer.fwd_bwd_fn = trainer._forward_backward_body
        return trainer

    def step(self, trainer, step):
        """One forward and backward; the loss. Gradients are in the model."""
        tokens, labels = self.batch(step)
        positions = torch.arange(LENGTH, dtype=torch.int32).repeat(BATCH, 1)
        return trainer.forward_backward_step(
            input_dict={"input": tokens, "positions": positions},
            labels=labels,
            global_valid_tokens=torch.tensor(float(BATCH * LENGTH * self.data_ranks)),
        )

    @property
    def data_ranks(self):
        return self.dims.get_mesh("batch").size() if self.dims.dp_enabled else 1

    def train(self, is_graph, steps=2, scale=1.0, **options):
        """Losses, gradients and weights of some steps; ``scale`` is a mistake on purpose."""
        seen = {}
        with on_cpu():
            trainer = self.trainer(is_graph, **options)
            (model,) = trainer.model_parts
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            for step in range(steps):
                optimizer.zero_grad()
                seen[f"step {step} loss"] = self.step(trainer, step).detach().clone()
                for name, parameter in model.named_parameters():
                    parameter.grad.mul_(scale)
                    seen[f"step {step} gradient {name}"] = parameter.grad.detach().clone()
                optimizer.step()
        for name, parameter in model.named_parameters():
            seen[f"weight {name}"] = parameter.detach().clone()
        return seen, trainer
