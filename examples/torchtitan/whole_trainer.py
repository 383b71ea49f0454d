"""torchtitan's whole trainer on CPU ranks, from the command lines of its own integration tests."""

import os
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cpu_device import ANSWERS
from debug_models import on_cpu
from ring_attention import HANDLERS
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor.experimental._context_parallel import _attention
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.distributed import utils as dist_utils
from torchtitan.experiments.graph_trainer import jit_backend
from torchtitan.experiments.graph_trainer import trainer as graph_trainer
from torchtitan.experiments.graph_trainer.graph_pp import graph_builder, pipeline
from torchtitan.experiments.graph_trainer.graph_pp.stage import GraphPipelineStage
from torchtitan.models.common import token_dispatcher

# Shapes for two cores. FSDP2's mean is an operation that only NCCL has, and so is its dtype.
SMALL = (
    *("--training.local_batch_size", "2", "--training.seq_len", "64"),
    *("--training.mixed_precision_param", "float32"),
    *("--training.mixed_precision_reduce", "float32"),
    *("--debug.seed", "42", "--debug.deterministic", "--training.disable_cuda_graphs"),
)
# What makes machine code of a graph: the graph itself is what a golden is of.
COMPILERS = (
    *("regional_inductor_pass", "full_inductor_compilation_pass"),
    *("cudagraph_pass", "insert_kernel_annotations_pass"),
)


class RandomBatches:
    """Tokens without a text, which the wheel has not; a stream of its own for each data rank."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def build(self, *, dp_rank, seq_len, local_batch_size, **options):
        self.rank = dp_rank
        self.shape = (local_batch_size, seq_len)
        return self

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        positions = torch.arange(self.shape[1], dtype=torch.int32).repeat(self.shape[0], 1)
        while True:
            tokens, labels = torch.randint(
                0, self.vocabulary, (2, *self.shape), generator=generator
            )
            yield {"input": tokens, "positions": positions}, labels


def config_of(line, folder, *more):
    """Return torchtitan's config of a command line, made small."""
    words = [word for part in line for word in part.split(maxsplit=1)]
    config = ConfigManager().parse_args([*SMALL, *words, *more, "--dump_folder", str(folder)])
    config.dataloader = RandomBatches(config.model_spec.model.vocab_size)
    if hasattr(config.compile, "disable_passes"):
        config.compile.disable_passes = [*config.compile.disable_passes, "cudagraph_pass"]
    config.validator.enable = False
    config.debug.enable_structured_logging = False
    return config


@contextmanager
def trainer_of(config):
    """Build the trainer of a config in the world of the test, and close it."""
    with ExitStack() as stack:
        stack.enter_context(on_cpu())
        stack.enter_context(mock.patch.dict(os.environ, LOCAL_RANK="0"))
        for name, answer in ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cpu, name, answer, create=True))
        # It begins with a barrier on numbers of devices, which the CPU has not.
        stack.enter_context(mock.patch.object(dist_utils, "set_pg_timeouts"))
        trainer = config.build()
        for part in trainer.model_parts:
            for module in part.modules():
                if hasattr(module, "set_force_sum_reduction_for_comms"):
                    module.set_force_sum_reduction_for_comms(True)
        try:
            yield trainer
        finally:
            trainer.close()


def all_to_all_of_lists(outputs, inputs, group=None):
    """Exchange rows of different numbers: gloo's own all-to-all of lists takes equal ones only."""
    counts = [len(each) for each in outputs]
    received = torch.cat(inputs).new_empty(sum(counts), *inputs[0].shape[1:])
    sent = [len(each) for each in inputs]
    dist.all_to_all_single(received, torch.cat(inputs), counts, sent, group)
    for output, part in zip(outputs, received.split(counts), strict=True):
        output.copy_(part)


def with_copies_for_offloads(apply_passes):
    """Return passes behind which an offload is a copy: the operators use streams of a GPU."""
    operators = torch.ops.ao
    copies = (operators.offload.default, operators.reload.default, operators.wait_tensor.default)

    def apply(*args, **options):
        gm = apply_passes(*args, **options)
        for node in gm.graph.nodes:
            if node.target in copies:
                node.target = torch.ops.aten.clone.default
                node.args, node.kwargs = node.args[:1], {}
        gm.recompile()
        return gm

    return apply


@contextmanager
def on_gloo():
    """Let training run on gloo ranks."""
    passes = with_copies_for_offloads(graph_trainer.apply_graph_passes)
    with (
        mock.patch.object(dist, "all_to_all", all_to_all_of_lists),
        mock.patch.dict(_attention.custom_ops, HANDLERS),
        mock.patch.object(graph_trainer, "apply_graph_passes", passes),
        # A trace of chunks would compare strides, and so ask whether one of unknown size has one row.
        torch.autograd.enforce_grad_layout_policy(False),
    ):
        yield


@contextmanager
def in_float64():
    """Let training compute in float64 on gloo ranks.

    On a CPU, eager training and the graph add in another order, so last bits of float32 differ. What
    differs between float64 numbers that are rounded to float32 is no matter of order.
    """
    with mock.patch.dict(TORCH_DTYPE_MAP, float32=torch.float64), on_gloo():
        yield


def train(config, steps=2):
    """Train some steps; return losses, clipped gradients and weights by name."""
    seen = {}
    losses = []
    with trainer_of(config) as trainer:
        step_of_trainer = trainer.forward_backward_step

        def noted(**batch):
            loss = step_of_trainer(**batch)
            losses.append(loss.detach().clone())
            return loss

        trainer.forward_backward_step = noted
        batches = trainer.batch_generator(trainer.dataloader)
        for step in range(steps):
            trainer.step += 1
            trainer.train_step(batches)
            seen[f"step {step} loss"] = losses[-1]
            for name, parameter in named_parameters(trainer):
                seen[f"step {step} gradient {name}"] = parameter.grad.detach().clone()
        for name, parameter in named_parameters(trainer):
            seen[f"weight {name}"] = parameter.detach().clone()
    return seen


def named_parameters(trainer):
    """Yield the parameters that the step has a gradient of, by the names of the plain model."""
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                yield name.replace("_checkpoint_wrapped_module.", ""), parameter


class Traced(Exception):
    """The graphs are there; their run would tell no more."""


def flash_attention_of_cuda(query, key, value, *, scale=None, is_causal=False, enable_gqa=False):
    """Attend by CUDA's operator: context parallelism knows none of the CPU's."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    return attention(query, key, value, 0.0, is_causal, False, scale=scale)[0]


@contextmanager
def as_on_gpus(config):
    """Trace what only GPUs run: a trace asks for shapes, and allocates no buffer of a GPU."""
    config.compile.disable_passes = [*config.compile.disable_passes, *COMPILERS]
    with ExitStack() as stack:
        for dispatcher in ("HybridEPTokenDispatcher", "MinimalAsyncEPTokenDispatcher"):
            stack.enter_context(
                mock.patch.object(getattr(token_dispatcher, dispatcher), "init_buffer")
            )
        if config.parallelism.context_parallel_degree > 1:
            stack.enter_context(
                mock.patch.object(F, "scaled_dot_product_attention", flash_attention_of_cuda)
            )
        # It would compare strides, and so ask whether a batch of unknown size has one row.
        stack.enter_context(torch.autograd.enforce_grad_layout_policy(False))
        yield


def traced_step(config):
    """Return what torchtitan traces for the first step, after its passes, and before a compiler."""
    with (
        as_on_gpus(config),
        mock.patch.object(graph_trainer, "run_traced", side_effect=Traced),
        trainer_of(config) as trainer,
    ):
        try:
            trainer.train_step(trainer.batch_generator(trainer.dataloader))
        except Traced:
            return trainer._traced_step
    raise AssertionError("the trainer ran a step without a trace")


def traced_stages(config):
    """Return the graphs of GraphPP's stages of this rank, by name, before a compiler.

    The shapes that a stage hands on are given: in a fake world no other rank says them.
    """
    size = (config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len)
    tokens = torch.empty(size, dtype=torch.int64)
    hidden = torch.empty(*size, config.model_spec.model.dim, requires_grad=True)

    def stage_of(part, *, stage_index, **options):
        inputs = tokens if stage_index == 0 else hidden
        return GraphPipelineStage(
            part, stage_index=stage_index, input_args=inputs, output_args=hidden, **options
        )

    with (
        as_on_gpus(config),
        mock.patch.object(pipeline, "GraphPipelineStage", stage_of),
        mock.patch.object(graph_builder, "_compile_graph_pp_module", lambda gm, **options: gm),
        mock.patch.object(graph_builder, "_compile_stage_graphs", side_effect=Traced),
        trainer_of(config) as trainer,
    ):
        runtime = trainer.pp_schedule
        try:
            trainer.train_step(trainer.batch_generator(trainer.dataloader))
        except Traced:
            return graphs_of(runtime)
    raise AssertionError("the trainer ran a step without graphs of stages")


def compiled_halves(config):
    """Return the graphs of forward and backward that jit mode compiles, behind its bucketing.

    They run as they are: a fake world moves no data.
    """
    found = []

    def keeping(graph_pass):
        def keep(gm, *args, **options):
            found.append(graph_pass(gm, *args, **options))
            return found[-1]

        return keep

    def unchanged(gm, example_inputs):
        return gm

    keep = keeping(unchanged)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, keep_inference_input_mutations=True)
    with ExitStack() as stack:
        stack.enter_context(as_on_gpus(config))
        stack.enter_context(
            mock.patch.object(torch._dynamo, "lookup_backend", return_value=backend)
        )
        for name in ("autobucketing", "transformer_block_bucketing"):
            graph_pass = getattr(jit_backend, f"{name}_reordering_pass")
            patch = mock.patch.object(jit_backend, graph_pass.__name__, keeping(graph_pass))
            stack.enter_context(patch)
        trainer = stack.enter_context(trainer_of(config))
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
    forward, backward = found
    return {"forward": forward, "backward": backward}


def graphs_of(runtime):
    """Return the graphs of a pipeline's stages, and of pairs that overlap, by name."""
    found = {}
    for stage in runtime.schedule._stages:
        modules = stage.graphs.modules
        for part in ("unshard", "fw", "full_bw", "bw_di", "bw_dw", "reduce_grad"):
            graph = getattr(modules, part)
            if graph is not None:
                found[f"stage {stage.stage_index} {part}"] = graph
    pairs = runtime.graph_provider._overlap_graphs or {}
    for (forward, backward), pair in sorted(pairs.items()):
        found[f"stage {forward} fw, stage {backward} full_bw"] = pair.multiplexed_graph
    return found
