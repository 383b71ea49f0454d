"""Two real processes: layouts, ranks by name, and another number of ranks."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from pytest_gtrainer.over_time.comparing import whole_of
from pytest_gtrainer.over_time.files import Entry, entry_of
from tests.over_time.trainers import SCRIPT, compare, planted, record

BATCH = "        tokens = self.batches.next()\n"
UNREDUCED = (
    "        if self.rank == 1 and self.batches.position == 2:\n"
    "            self.model.head.weight.register_post_accumulate_grad_hook(\n"
    "                lambda weight: setattr(weight, 'grad', weight.grad * 2)\n"
    "            )\n"
)
DRAWN = "        torch.manual_seed(options.seed + 1000 * self.rank)\n"
SWAPPED = (
    "        shard = self.model.head.weight.to_local().detach()\n"
    "        shards = [torch.empty_like(shard) for _ in range(2)]\n"
    "        dist.all_gather(shards, shard)\n"
    "        shard.copy_(shards[1 - self.rank])\n"
)


# Several records in the same two processes: the start of torch is most of the time of a run.
DRIVER = """
import json, sys
from pathlib import Path
from pytest_gtrainer.__main__ import main
for arguments in json.loads(Path(sys.argv[1]).read_text()):
    assert main(arguments) == 0, arguments
"""
STAY = (
    ('dist.init_process_group("gloo")', 'dist.is_initialized() or dist.init_process_group("gloo")'),
    ("        dist.destroy_process_group()\n", "        pass\n"),
)


def on_two_ranks(*command):
    """Run a command on two ranks, and return the lines that they print."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    run = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.second_tier
def test_mistakes_on_one_rank_and_another_number_of_ranks(tmp_path, capsys):
    """Z1, Z2, Z3: ranks are named; what two ranks have saved is what one rank loads, and the run
    goes on with the same bits and losses on two.
    """
    good, saved = tmp_path / "good", tmp_path / "step2"
    whole = "--steps=3", "--save-at=2", f"--save={tmp_path}"
    printed = on_two_ranks("-m", "pytest_gtrainer", "record", f"--to={good}", SCRIPT, *whole)
    losses = [line for line in printed if line.startswith("step ")]
    assert len(losses) == 3

    changes = {
        "step 1, gradient: head.weight, rank 1": (BATCH, BATCH + UNREDUCED),
        "step 0, random: torch.cpu, rank 1": (DRAWN, DRAWN.replace("1000", "999")),
        "step 0, load: head.weight, ranks 0, 1": (DRAWN, DRAWN + SWAPPED),
    }
    resumed = "--steps=3", f"--resume={saved}"
    runs = [("resumed", STAY, resumed)]
    for number, change in enumerate(changes.values()):
        runs.append((str(number), (*STAY, change), ["--steps=2"]))
    commands = []
    for name, planted_changes, arguments in runs:
        (tmp_path / "scripts" / name).mkdir(parents=True)
        script = planted(tmp_path / "scripts" / name, *planted_changes)
        commands.append(["record", "--to", str(tmp_path / name), str(script), *arguments])
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "commands").write_text(json.dumps(commands))
    printed = on_two_ranks(tmp_path / "driver.py", tmp_path / "commands")

    status, compared = compare(capsys, good, tmp_path / "resumed")
    assert status == 0, compared
    assert losses[2:] == [line for line in printed if line.startswith("step 3")]
    for number, named in enumerate(changes):
        status, compared = compare(capsys, good, tmp_path / str(number))
        assert status == 1
        assert f"first difference: {named}\n" in compared

    assert record(tmp_path / "one", SCRIPT, *resumed) == 0
    status, compared = compare(capsys, good, tmp_path / "one")
    assert "other world_size: 2 in A, 1 in B" in compared
    assert "because each rank has its own and the ranks are others: loss: root" in compared
    assert "entries that differ: load 0 of 95, random 0 of 1, data 0 of 1" in compared


ENDS = """
import os, resource, signal, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, record = dist.get_rank(), sys.argv[1]
torch.manual_seed(rank)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    if step == 2 and rank == 1:
        break
    if step == 2 and rank == 2:  # the disk is full
        size = os.path.getsize(f"{record}/rank2.jsonl")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    if step == 3 and rank == 3:
        # Not before the others have ended, because the launcher ends them.
        dist.monitored_barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {rank} has ended after step {step}", flush=True)
dist.monitored_barrier()
"""


@pytest.mark.second_tier
def test_ranks_that_end_in_four_ways(tmp_path, capsys):
    """One in order, one early, one on a full disk, one killed: each file is read as far as it goes,
    and a full disk does not end the training.
    """
    script = tmp_path / "train.py"
    script.write_text(ENDS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    to = tmp_path / "a"
    command = [*launcher, "-m", "pytest_gtrainer", "record", f"--to={to}", script, to]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 1, run.stderr
    assert "rank 2 has ended after step 3" in run.stdout
    assert "recording ended at step 2: OSError: [Errno 27] File too large" in run.stderr
    shutil.copytree(to, tmp_path / "b")
    status, printed = compare(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "first difference" not in printed
    assert "B: rank 2 was cut after step 1: its last line is missing\n" in printed
    assert "B: rank 3 was cut after step 2: its last line is missing\n" in printed
    assert "B: its ranks stopped at different steps: " in printed
    assert "rank 1 after step 1, rank 2 after step 1, rank 3 after step 2\n" in printed
    assert "equal: " in printed


@pytest.mark.gt_world("ranks", size=4, mesh={"dp": 2, "tp": 2})
def test_a_tensor_on_any_mesh_is_the_full_tensor(gt_world, gt_mesh):
    """Z1: sharded twice, unevenly, replicated; an addend is only compared with its own kind."""
    whole = torch.arange(35, dtype=torch.float32, device=gt_world.device).view(7, 5)
    layouts = {
        "replicated": [Replicate(), Replicate()],
        "rows": [Shard(0), Replicate()],
        "both": [Shard(0), Shard(1)],
        "twice": [Shard(0), Shard(0)],
        "columns": [Replicate(), Shard(1)],
    }
    tensors = {name: distribute_tensor(whole, gt_mesh, layout) for name, layout in layouts.items()}
    tensors["partial"] = DTensor.from_local(whole, gt_mesh, [Partial(), Replicate()])
    own = {}
    for name, tensor in tensors.items():
        waiting = entry_of(tensor)
        dtype, shape, part = waiting.rest
        if isinstance(part, list):
            part = tuple(map(tuple, part))
        number = int(waiting.numbers) % 2**64
        own[name] = Entry((f"{number:x}",), dtype, tuple(shape), part)
    on_ranks = [None] * gt_world.size
    torch.distributed.all_gather_object(on_ranks, own)
    wholes = {}
    for name in tensors:
        wholes[name] = whole_of({rank: [on_ranks[rank][name]] for rank in range(gt_world.size)})
    assert wholes.pop("partial") is None
    assert wholes["rows"] is not None
    assert len(set(map(str, wholes.values()))) == 1
    del on_ranks[0]["both"]
    lost = {rank: [on_ranks[rank]["both"]] for rank in range(1, gt_world.size)}
    assert whole_of(lost) is None, "a shard is missing"
