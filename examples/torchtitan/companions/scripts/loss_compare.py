"""Stands for ``scripts/loss_compare.py`` of torchtitan's repository, which the wheel does not have.

It makes a seed checkpoint, trains two command lines from it for as many steps as asked, each by
torchtitan's own trainer, and exits with 1 if the loss of any step has other bits. The losses are
read where torchtitan writes them, in TensorBoard's files. Smaller than there: ranks are forked and
speak gloo, shapes are ``whole_trainer.SMALL``, and a model has its first two layers.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.multiprocessing import start_processes

from pytest_gtrainer import dense_flex_attention

EXAMPLE = Path(__file__).parents[2]
TB_LOSS_TAG = "loss_metrics/global_avg_loss"
LAYERS = 2
METRICS = ("--metrics.enable_tensorboard", "--metrics.log_freq", "1")


def _rank_main(rank, size, line, folder, more):
    from whole_trainer import config_of, in_float64, trainer_of

    torch.set_num_threads(1)
    os.chdir(EXAMPLE)  # where tests/assets is
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    config = config_of(line, folder, "--checkpoint.enable", *METRICS, *more)
    layers = config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    experts = any(getattr(layer, "moe", None) is not None for layer in layers)
    if experts:
        # Gathered in another dtype, experts' weights would not be cast: tests/test_faults.py.
        config.training.mixed_precision_param = "bfloat16"
    with (
        in_float64(),
        dense_flex_attention(),
        trainer_of(config) as trainer,
    ):
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    dist.destroy_process_group()


def _on_ranks(size, module, config, options, folder, *more):
    import whole_trainer  # noqa: F401  before the fork, so that ranks need not import it

    line = [f"--module {module}", f"--config {config}"]
    store = Path(folder, "store")
    store.unlink(missing_ok=True)
    arguments = (size, line, folder, [*options.split(), *more])
    start_processes(_rank_main, arguments, nprocs=size, start_method="fork")


def create_seed_checkpoint(enable, module, config, output_folder, job_dump_folder):
    """Write the weights that both sides begin with, by one rank."""
    if enable:
        _on_ranks(1, module, config, "", job_dump_folder, "--checkpoint.create_seed_checkpoint")


def run_training(
    scenario,
    module,
    config,
    options,
    steps,
    enable_seed_checkpoint,
    output_folder,
    job_dump_folder,
    ngpus,
    tb_folder="tb",
):
    """Train one side on ``ngpus`` ranks; its losses are in ``tb_folder`` then."""
    more = ["--training.steps", str(steps), "--metrics.save_tb_folder", tb_folder]
    if enable_seed_checkpoint:
        more.append("--checkpoint.load_only")
    _on_ranks(ngpus, module, config, options, job_dump_folder, *more)


def extract_losses_from_tensorboard(job_dump_folder, tb_folder):
    """Return the loss of each step, as torchtitan wrote it."""
    (folder,) = Path(job_dump_folder, tb_folder).iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    return {scalar.step: scalar.value for scalar in events.Scalars(TB_LOSS_TAG)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs=2)
    for side in ("baseline", "test"):
        for name in ("module", "config", "options"):
            parser.add_argument(f"--{side}-{name}", default="")
        parser.add_argument(f"--{side}-ngpus", type=int)
    parser.add_argument("--assert-equal", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--job-dump-folder", required=True)
    given = vars(parser.parse_args())

    folder = given["job_dump_folder"]
    create_seed_checkpoint(True, given["baseline_module"], given["baseline_config"], None, folder)
    losses = []
    for side in ("baseline", "test"):
        parts = [given[f"{side}_{name}"] for name in ("module", "config", "options")]
        ranks = given[f"{side}_ngpus"]
        run_training(side, *parts, given["steps"], True, None, folder, ranks, f"tb_{side}")
        losses.append(extract_losses_from_tensorboard(folder, f"tb_{side}"))
    baseline, test = losses
    for step, loss in baseline.items():
        print(f"step {step}: {loss!r} and {test.get(step)!r}", flush=True)
    # A model that does not train would have equal losses under any trainer.
    if len(set(baseline.values())) < given["steps"]:
        sys.exit("the losses do not move: this comparison proves nothing")
    if given["assert_equal"] and baseline != test:
        sys.exit("losses differ")


if __name__ == "__main__":
    # A script, run from a folder of which Python knows nothing.
    sys.path.insert(0, str(EXAMPLE))
    from cpu_device import use_cpu

    use_cpu()
    main()
