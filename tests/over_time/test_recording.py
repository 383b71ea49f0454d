"""Recording: it changes no bit, refuses what it cannot record, and survives what goes wrong."""

import resource
import subprocess
import sys

import pytest
import torch
from torch import nn

from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal, record_training
from pytest_gtrainer.over_time.comparing import compare_runs
from pytest_gtrainer.over_time.files import RecordError, read_run
from tests.over_time.trainers import SCRIPT, planted, record


def train(
    steps, folder=None, *, seed=0, width=8, compiled="", interrupt=None, nudge=None, **options
):
    """Train a small model, recorded if there is a folder, and return what it ends with."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 16), nn.Dropout(0.5), nn.BatchNorm1d(16))
    trained = model
    if compiled:
        model[0].compile(backend=compiled)
        trained = torch.compile(model, backend=compiled) if compiled == "eager" else model
    optimizer = torch.optim.AdamW(model.parameters())

    def run():
        for step in range(steps):
            if step == interrupt:
                raise KeyError("gone")
            if nudge and step == 1:
                with torch.no_grad():
                    model[0].weight[nudge] += 1.0
            # Two backwards are accumulated.
            for _ in range(2):
                trained(torch.randn(4, width)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    if folder is None:
        run()
    else:
        with record_training(trained, optimizer, folder, **options):
            run()
    return {**model.state_dict(), "random": torch.get_rng_state()}


@pytest.mark.parametrize("options", [{}, {"values": True, "activations": "*", "every": 2}])
def test_recording_changes_no_bit(tmp_path, options):
    """Z1: weights, buffers and random states end as without it."""
    plain = train(3)
    assert_bitwise_equal(train(3, tmp_path / "record", **options), plain)
    assert_bitwise_different(train(3, tmp_path / "other", seed=1, **options), plain)


@pytest.mark.second_tier
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_recording_changes_no_bit_of_compiled_modules(tmp_path, backend):
    """Z1: hooks are not compiled into a module, in place or wrapped."""
    plain = train(3, compiled=backend)
    torch._dynamo.reset()
    recorded = train(3, tmp_path / "a", compiled=backend, activations="*")
    assert_bitwise_equal(recorded, plain)
    assert_bitwise_different(train(3, compiled=backend, seed=1), plain)
    torch._dynamo.reset()
    train(3, tmp_path / "b")
    result = compare_runs(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert result.status == 0, str(result)
    assert "other compiled" in str(result)
    assert ("names of A without the prefixes of wrappers" in str(result)) == (backend == "eager")


def test_two_microbatches_and_their_sum(tmp_path):
    """Inputs and losses of each backward; gradients as the last one leaves them."""
    train(2, tmp_path)
    phases = read_run(tmp_path).steps[1]
    assert len(phases["loss"]["root"][0]) == 2
    (inputs,) = phases["data"].values()
    assert [len(entry.numbers) for entry in inputs[0]] == [4, 4]
    assert (
        phases["gradient"].keys()
        == phases["clip"].keys()
        == {"0.weight", "0.bias", "2.weight", "2.bias"}
    )
    assert phases["gradient"]["0.weight"] != phases["clip"]["0.weight"]
    assert {"0.weight.exp_avg", "2.running_mean", "param_groups.0.betas.1"} <= phases[
        "optimiser"
    ].keys()


class WithAverage(nn.Module):
    """Its average is part of the model, and no optimiser has it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.average = nn.Linear(4, 1).requires_grad_(False)

    def forward(self, rows):
        return self.net(rows)


def record_average(folder, *, decay=0.9, mode="a", factor=1.0):
    torch.manual_seed(0)
    model = WithAverage()
    groups = [{"params": list(model.net.parameters()), "mode": mode}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with record_training(model, optimizer, folder):
        for _ in range(3):
            (model(torch.ones(2, 4)).sum() * factor).backward()
            optimizer.step()
            model.average.weight.data.lerp_(model.net.weight.data, 1 - decay)
    return read_run(folder)


def test_weights_that_no_optimiser_has_are_recorded_after_each_step(tmp_path):
    """Z1: an average inside the model; the first optimiser step comes before its first update."""
    first = record_average(tmp_path / "a")
    assert compare_runs(first, record_average(tmp_path / "same")).status == 0
    other = compare_runs(first, record_average(tmp_path / "b", decay=0.5))
    assert [str(each) for each in other.differences] == [
        "step 1, optimiser: average.weight, rank 0"
    ]


def test_an_option_that_is_a_text(tmp_path):
    first = record_average(tmp_path / "a")
    names = [
        each.name
        for each in compare_runs(first, record_average(tmp_path / "b", mode="b")).differences
    ]
    assert names == ["param_groups.0.mode='a'", "param_groups.0.mode='b'"]


def test_a_loss_that_is_not_finite_is_said(tmp_path):
    first = record_average(tmp_path / "a", factor=float("nan"))
    result = compare_runs(first, record_average(tmp_path / "b", factor=float("nan")))
    assert "the loss of step 0 is not finite" in str(result)
    assert "not finite" not in str(compare_runs(*[record_average(tmp_path / n) for n in "cd"]))


def test_two_optimisers_that_step_once_each(tmp_path):
    """A step ends when the next forward begins, not with the first optimiser."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.AdamW(part.parameters()) for part in model]
    with record_training(model, optimizers, tmp_path) as recorder:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert recorder.recorded == 3
    steps = read_run(tmp_path).steps
    assert list(steps) == [0, 1, 2]
    assert {"0.weight.exp_avg", "1.weight.exp_avg"} <= steps[2]["optimiser"].keys()


def test_a_model_inside_a_model_is_named_from_the_outermost(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Whole(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 1)\n"
        "whole = Whole()\n"
        "optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)\n"
        "whole.decoder(whole.encoder(torch.ones(2, 3))).sum().backward()\n"
        "optimizer.step()\n"
    )
    assert record(tmp_path / "record", script) == 0
    phases = read_run(tmp_path / "record").steps[0]
    assert "encoder.weight" in phases["load"]
    assert "decoder.weight" in phases["gradient"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("", "nothing of {script} was recorded: in this process no optimiser of torch has stepped"),
        ("import torch\ntorch.optim.SGD([torch.ones(1, requires_grad=True)]).step()", "nothing of"),
    ],
    ids=["empty", "no backward"],
)
def test_a_script_that_trains_nothing(tmp_path, capsys, body, sentence):
    script = tmp_path / "train.py"
    script.write_text(body)
    assert record(tmp_path / "record", script) == 2
    assert sentence.format(script=script) in capsys.readouterr().err


def test_what_cannot_be_recorded_is_one_sentence(tmp_path, capsys):
    train(1, tmp_path / "old")
    before = (tmp_path / "old" / "rank0.jsonl").read_bytes()
    assert record(tmp_path / "old", SCRIPT) == 2
    assert "holds a record already: name another folder, or remove it" in capsys.readouterr().err
    assert (tmp_path / "old" / "rank0.jsonl").read_bytes() == before
    (tmp_path / "file").write_text("")
    assert record(tmp_path / "file", SCRIPT) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'file'} cannot be made: File exists\n"
    assert record(tmp_path / "new", tmp_path / "none.py") == 2
    assert capsys.readouterr().err == f"there is no script {tmp_path / 'none.py'}\n"
    assert record(tmp_path / "new", SCRIPT, options=["--every=0"]) == 2
    assert "at least 1, not 0" in capsys.readouterr().err
    with pytest.raises(RecordError, match="holds a record already"):
        train(1, tmp_path / "old")


def test_a_crash_leaves_the_steps_before(tmp_path):
    train(4, tmp_path / "whole")
    with pytest.raises(KeyError):
        train(4, tmp_path / "crashed", interrupt=2)
    result = compare_runs(read_run(tmp_path / "whole"), read_run(tmp_path / "crashed"))
    assert not result.differences
    assert result.status == 1
    assert "B: rank 0 ended after step 1 by KeyError" in str(result)
    assert "only in A: 2 steps, 2 to 3" in str(result)


def trained_with(folder, *, steps=3, every=1, then=None, is_beside=False):
    """Train, call ``then`` with what comes after the last step, and return the record."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    average = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    beside = {"average": average} if is_beside else {}
    with record_training(model, optimizer, folder, every=every, beside=beside):
        for _ in range(steps):
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
        if then is not None:
            with torch.no_grad():
                then(average if is_beside else model)
    return read_run(folder)


CHANGED_AT_THE_END = {
    "a weight": ("0.weight", False, lambda model: model[0].weight.mul_(1.0001)),
    "the last buffer": (
        "1.num_batches_tracked",
        False,
        lambda model: model[1].num_batches_tracked.add_(1),
    ),
    "a buffer": ("1.running_var", False, lambda model: model[1].running_var.mul_(2)),
    "a module beside it": ("beside average.bias", True, lambda average: average.bias.zero_()),
}


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("kind", CHANGED_AT_THE_END)
def test_what_changes_after_the_last_step_is_the_end(tmp_path, kind, every):
    """As by a final average of the weights, or update_bn. The last step may not be recorded."""
    name, is_beside, change = CHANGED_AT_THE_END[kind]
    plain = trained_with(tmp_path / "a", every=every, is_beside=is_beside)
    other = trained_with(tmp_path / "b", every=every, is_beside=is_beside, then=change)
    again = trained_with(tmp_path / "c", every=every, is_beside=is_beside)
    result = compare_runs(plain, other)
    assert result.status == 1
    assert str(result.differences[0]).startswith(f"step 2, end: {name}, rank 0")
    assert list(result.counts) == ["end"]
    same = compare_runs(plain, again)
    assert (same.status, same.shorter) == (0, "")
    assert same.compared > 0
    assert f"in {len(plain.steps)} step" in str(same)  # the end is no step


@pytest.mark.parametrize(("steps", "every"), [(4, 1), (4, 5), (3, 2)])
def test_a_run_that_ends_earlier_is_named_by_what_it_left(tmp_path, steps, every):
    """Both have recorded the same steps, if not each was recorded."""
    whole = trained_with(tmp_path / "a", steps=5, every=every)
    shorter = trained_with(tmp_path / "b", steps=steps, every=every)
    for first, second, letters in ((whole, shorter, "BA"), (shorter, whole, "AB")):
        result = compare_runs(first, second)
        assert not result.differences
        assert result.shorter == (
            f"{letters[0]} ends after step {steps - 1}, and {letters[1]} after 4"
        )


def test_records_without_an_end_are_compared_without_it(tmp_path):
    """As those of a version that wrote none."""
    runs = [trained_with(tmp_path / name) for name in "ab"]
    file = tmp_path / "b" / "rank0.jsonl"
    lines = file.read_text().splitlines()
    assert [line.startswith('{"left":2,') for line in lines].index(True) == len(lines) - 2
    file.write_text("\n".join([*lines[:-2], lines[-1]]) + "\n")
    old = read_run(tmp_path / "b")
    for first, second, letter in ((runs[0], old, "A"), (old, runs[0], "B")):
        result = compare_runs(first, second)
        assert (result.status, result.shorter) == (0, "")
        assert f"not compared: end, which only {letter} has" in str(result)
    with pytest.raises(KeyError):
        train(4, tmp_path / "crashed", interrupt=2)
    assert not read_run(tmp_path / "crashed").left


def test_names_of_the_end_are_those_of_the_steps(tmp_path):
    """A compiled model has another prefix, and a resumed run begins elsewhere."""
    train(3, tmp_path / "a")
    train(3, tmp_path / "b", compiled="eager")
    result = compare_runs(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert result.status == 0, str(result)
    assert "only in" not in str(result)
    shifted = compare_runs(read_run(tmp_path / "a"), read_run(tmp_path / "b"), at=0)
    assert shifted.compared == result.compared


@pytest.mark.second_tier
def test_a_killed_process_leaves_the_steps_before(tmp_path):
    script = planted(tmp_path, ("        self.optimizer.zero_grad()\n", "        os._exit(9)\n"))
    command = [sys.executable, "-m", "pytest_gtrainer", "record", "--to=killed", script]
    assert subprocess.run(command, cwd=tmp_path).returncode == 9
    run = read_run(tmp_path / "killed")
    assert list(run.steps) == [0]
    assert run.notes == ["rank 0 was cut after step 0: its last line is missing"]


def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path, capsys):
    """A limit on the size of files fails in the same place."""
    plain = train(4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, hard))
    try:
        recorded = train(4, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_bitwise_equal(recorded, plain)
    assert_bitwise_different(train(4, seed=1), plain)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "recording ended at step 3: OSError: [Errno 27] File too large"
    run = read_run(tmp_path)
    assert list(run.steps) == [0, 1, 2]
    assert run.notes == ["rank 0 was cut after step 2: its last line is missing"]


@pytest.mark.second_tier
def test_a_recording_that_failed_says_only_why(tmp_path, capsys):
    """The script did train."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        assert record(tmp_path / "record", SCRIPT, "--steps=1") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (
        capsys.readouterr().err == "recording ended at step 0: OSError: [Errno 27] File too large\n"
    )


def test_a_rank_that_is_known_late_names_the_file(tmp_path, monkeypatch):
    """A script may make its processes and ranks itself."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with record_training(model, optimizer, tmp_path):
        monkeypatch.setenv("RANK", "3")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.jsonl"]
