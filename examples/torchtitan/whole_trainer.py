"""torchtitan's whole trainer on CPU ranks, from the command lines of its own integration tests."""

import os
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from cpu_device import ANSWERS
from debug_models import on_cpu
from torchtitan.config import ConfigManager
from torchtitan.distributed import utils as dist_utils
from torchtitan.experiments.graph_trainer import trainer as graph_trainer

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
    config = ConfigManager().parse_args([*words, *SMALL, *more, "--dump_folder", str(folder)])
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


class Traced(Exception):
    """The graph is there; its run would tell no more."""


def traced_step(config):
    """Return what torchtitan traces for the first step, after its passes, and before a compiler."""
    config.compile.disable_passes = [*config.compile.disable_passes, *COMPILERS]
    with (
        mock.patch.object(graph_trainer, "run_traced", side_effect=Traced),
        trainer_of(config) as trainer,
    ):
        try:
            trainer.train_step(trainer.batch_generator(trainer.dataloader))
        except Traced:
            return trainer._traced_step
    raise AssertionError("the trainer ran a step without a trace")
