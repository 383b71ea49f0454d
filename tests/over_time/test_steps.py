"""The steps of a run that are recorded: their numbers, phases and names."""

import copy
import sys
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import record_training
from pytest_gtrainer.numerics import knobs
from pytest_gtrainer.over_time.files import read_run
from pytest_gtrainer.over_time.recorder import Recorder


def model_of(*parts):
    torch.manual_seed(0)
    return nn.Sequential(*(parts or (nn.Linear(2, 2), nn.Linear(2, 1))))


def run_steps(model, optimizers, number):
    for _ in range(number):
        model(torch.ones(3, 2)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("begin", [0, 1, 4])
def test_the_first_step_and_multiples_are_recorded(tmp_path, begin, every):
    """A resumed run counts on, so that it records the same steps as the whole one."""
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    run_steps(model, [optimizer], begin)
    with record_training(model, optimizer, tmp_path / "a", every=every) as recorder:
        run_steps(model, [optimizer], 7)
    expected = [step for step in range(begin, begin + 7) if step == begin or step % every == 0]
    run = read_run(tmp_path / "a")
    assert list(run.steps) == expected
    assert (recorder.recorded, recorder.step) == (len(expected), begin + 6)
    assert run.header["every"] == every
    assert ["load" in run.steps[step] for step in expected] == [step == begin for step in expected]


@pytest.mark.parametrize("every", [True, 0, -1, 1.0, "2"])
def test_every_is_a_number_of_steps(tmp_path, every):
    words = f"^every is a number of steps, at least 1, not {every}$"
    with pytest.raises(ValueError, match=words):
        Recorder(tmp_path / "a", every=every)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("loaded_before", range(1, 5))
@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_load_is_recorded_with_the_next_step_if_that_is_recorded(tmp_path, what, loaded_before):
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    kept = {"model": model, "optimizer": optimizer}[what]
    with record_training(model, optimizer, tmp_path / "a", every=2):
        for step in range(5):
            if step == loaded_before:
                kept.load_state_dict(copy.deepcopy(kept.state_dict()))
            run_steps(model, [optimizer], 1)
    run = read_run(tmp_path / "a")
    loads = {step for step in run.steps if "load" in run.steps[step]}
    assert loads == {0} | ({loaded_before} if loaded_before % 2 == 0 else set())
    if loaded_before in loads:
        names = {"0.weight", "0.weight.exp_avg", "1.bias.step"}
        assert names <= run.steps[loaded_before]["load"].keys()


def test_moments_of_all_optimisers_are_what_a_resumed_run_begins_with(tmp_path):
    model = model_of()
    optimizers = [torch.optim.Adam(part.parameters()) for part in model]
    run_steps(model, optimizers, 2)
    with record_training(model, optimizers, tmp_path / "a"):
        run_steps(model, optimizers, 1)
    [phases] = read_run(tmp_path / "a").steps.values()
    weights = ["0.weight", "0.bias", "1.weight", "1.bias"]
    moments = [f"{name}.{key}" for name in weights for key in ("step", "exp_avg", "exp_avg_sq")]
    assert list(phases["load"]) == [*weights, *moments]


def test_every_name_of_a_step_of_two_optimisers_with_groups(tmp_path):
    """Parameters have the names of the model; options those of their optimiser and group."""
    model, average = model_of(), model_of(nn.Linear(2, 1))
    lone = torch.ones(2, requires_grad=True)
    first = torch.optim.AdamW(
        [{"params": model[0].weight, "lr": 0.5}, {"params": [model[0].bias, lone]}], foreach=False
    )
    second = torch.optim.SGD([*model[1].parameters(), *average.parameters()], momentum=0.5)
    for parameter in (*average.parameters(), lone):
        parameter.grad = torch.zeros_like(parameter)
    with record_training(model, [first, second], tmp_path / "a", beside={"ema": average}):
        model(torch.ones(3, 2)).sum().backward()
        first.step()
        second.step()
    phases = read_run(tmp_path / "a").steps[0]
    weights = ["0.weight", "0.bias", "1.weight", "1.bias"]
    beside = ["beside ema.0.weight", "beside ema.0.bias"]
    lone_name = "param_groups.1.1"
    assert list(phases) == ["load", "random", "data", "loss", "gradient", "clip", "optimiser"]
    assert list(phases["load"]) == [*weights, *beside]
    assert list(phases["data"]) == ["input [0][0]"]
    assert list(phases["loss"]) == ["root"]
    assert list(phases["gradient"]) == weights
    assert list(phases["clip"]) == [*weights[:2], lone_name, *weights[2:], *beside]
    shared = ("lr", "eps", "weight_decay", "amsgrad", "maximize", "capturable", "differentiable")
    options = {f"param_groups.{group}.{name}" for group in (0, 1) for name in shared}
    options |= {f"param_groups.{group}.betas.{place}" for group in (0, 1) for place in (0, 1)}
    options |= {f"param_groups.{group}.foreach" for group in (0, 1)}
    options |= {f"param_groups.{group}.decoupled_weight_decay" for group in (0, 1)}
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    options |= {f"optimizers.1.param_groups.0.{name}" for name in (*names, "differentiable")}
    moments = {
        f"{name}.{moment}"
        for name in (*weights[:2], lone_name)
        for moment in ("step", "exp_avg", "exp_avg_sq")
    }
    moments |= {f"{name}.momentum_buffer" for name in (*weights[2:], *beside)}
    assert phases["optimiser"].keys() == {*weights, *beside, lone_name} | options | moments
    lr = phases["optimiser"]["param_groups.0.lr"][0][0]
    other = phases["optimiser"]["param_groups.1.lr"][0][0]
    assert (str(lr), str(other)) == ("0.5", "0.001")
    betas = [phases["optimiser"][f"param_groups.1.betas.{place}"][0][0] for place in (0, 1)]
    assert list(map(str, betas)) == ["0.9", "0.999"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_losses_of_one_element_are_numbers_and_others_are_not_recorded(tmp_path, shape):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters())
    with record_training(model, optimizer, tmp_path / "a"):
        result = model(torch.ones(2, 2))
        loss = result.sum().view(shape)
        torch.autograd.backward([loss, result], [torch.ones(shape), torch.ones(2, 1)])
        optimizer.step()
    calls = read_run(tmp_path / "a").steps[0]["loss"]["root"][0]
    assert list(map(str, calls)) == [f"{loss.item()!r} as f32[]"]


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_closure_begins_a_step_however_it_is_given(tmp_path, how):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 2)).sum()
        loss.backward()
        return loss

    with record_training(model, optimizer, tmp_path / "a") as recorder:
        for _ in range(2):
            if how == "keyword":
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
    assert recorder.recorded == 2
    run = read_run(tmp_path / "a")
    assert list(run.steps) == [0, 1]
    for phases in run.steps.values():
        assert len(phases["loss"]["root"][0]) == 1
        assert len(phases["gradient"]) == len(phases["clip"]) == 4


def test_lines_of_the_trainer_are_those_of_the_step(tmp_path):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters())

    def other_loss():
        model(torch.ones(2, 2)).sum().backward()  # other

    with record_training(model, optimizer, tmp_path / "a"):
        for step in range(3):
            if step == 1:
                other_loss()
            else:
                model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
    places = read_run(tmp_path / "a").places
    names = [places[step]["backward"].rpartition(" in ")[2] for step in range(3)]
    assert names == [
        test_lines_of_the_trainer_are_those_of_the_step.__name__,
        "other_loss",
        names[0],
    ]
    assert places[0] == places[2]
    assert places[0]["step"] == places[1]["step"]


def test_the_header_says_what_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1 2"])
    monkeypatch.setenv("RANK", "0")
    model = model_of()
    model[1].compile(backend="eager")
    optimizers = [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[1].parameters())]
    with record_training(model, optimizers, tmp_path / "a"):
        run_steps(model, optimizers, 1)
    header = read_run(tmp_path / "a").header
    settings = header.pop("settings")
    with torch.no_grad():
        assert settings == {name: repr(value) for name, value in knobs.values().items()}
    assert header == {
        "format": "record of pytest-gtrainer",
        "version": 1,
        "rank": 0,
        "world_size": 1,
        "model": "Sequential",
        "optimizers": ["Adam", "SGD"],
        "every": 1,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "compiled": ["1"],
        "arguments": ["--lr", "1 2"],
    }


@pytest.mark.parametrize("error", [KeyError("a"), KeyboardInterrupt(), SystemExit(3), None])
def test_the_last_line_says_how_the_block_ended(tmp_path, error):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters())
    kind = type(error) if error is not None else ()
    with suppress(kind), record_training(model, optimizer, tmp_path / "a"):
        run_steps(model, [optimizer], 2)
        if error is not None:
            raise error
    notes = [f"rank 0 ended after step 1 by {type(error).__name__}"] if error is not None else []
    assert read_run(tmp_path / "a").notes == notes
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_what_a_hook_raises_ends_the_recording_in_one_line(tmp_path, capsys, monkeypatch):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters())

    def raises(self, *args):
        raise ValueError("first line\nsecond line")

    with record_training(model, optimizer, tmp_path / "a") as recorder:
        run_steps(model, [optimizer], 2)
        monkeypatch.setattr(Recorder, "_add_gradients", raises)
        run_steps(model, [optimizer], 3)
    assert capsys.readouterr().err == "recording ended at step 2: ValueError: first line\n"
    assert (recorder.recorded, recorder.has_failed, recorder.is_over) == (2, True, True)
    run = read_run(tmp_path / "a")
    assert list(run.steps) == [0, 1]
    assert run.notes == ["rank 0 was cut after step 1: its last line is missing"]


def test_patterns_of_modules_that_match_none_are_said_in_order(tmp_path, capsys):
    model = model_of(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(model.parameters())
    patterns = ["z*", "1.*", "", "b", "1.0", "0"]
    with record_training(model, optimizer, tmp_path / "a", activations=patterns):
        run_steps(model, [optimizer], 1)
    assert capsys.readouterr().err == "".join(
        f"no module has a name like {pattern!r}\n" for pattern in ("b", "z*")
    )
    forward = read_run(tmp_path / "a").steps[0]["forward"]
    assert {name: len(entry[0]) for name, entry in forward.items()} == dict.fromkeys(
        ("0", "1.0", "1.1", "the whole model"), 1
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("traces", [False, True])
def test_gradients_that_no_backward_has_made(tmp_path, in_place, traces):
    """A graph with the backward in it returns them; a trace of it may call backward once."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    with record_training(model, optimizer, tmp_path / "a") as recorder:
        if traces:
            model(torch.ones(3, 2)).sum().backward()
            optimizer.zero_grad()
        for step in range(3):
            for parameter in parameters:
                if in_place and parameter.grad is not None:
                    parameter.grad.fill_(step + 1)
                else:
                    parameter.grad = torch.full_like(parameter, step + 1)
            optimizer.step()
            optimizer.step()  # the same gradients again are no step of a trainer
            if not in_place:
                optimizer.zero_grad()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # as a checkpoint does, to make a state
    assert recorder.recorded == 3
    run = read_run(tmp_path / "a")
    assert [sorted(run.steps[step]) for step in (1, 2)] == [["clip", "optimiser"]] * 2


def test_a_step_that_is_one_graph(tmp_path):
    """The trace calls the model and differentiates with fake tensors: not the step."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = dict(model.named_parameters())
    x = torch.ones(3, 2)

    def step_of(weights, x):
        loss = torch.func.functional_call(model, weights, x).square().mean()
        return torch.autograd.grad(loss, list(weights.values()))

    def by_graph():
        graph = make_fx(step_of, tracing_mode="fake")(weights, x)
        for _ in range(2):
            gradients = graph(weights, x)
            for parameter, gradient in zip(weights.values(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

    with record_training(model, optimizer, tmp_path / "graph"):
        by_graph()
    model.load_state_dict(model_of().state_dict())
    with record_training(model, optimizer, tmp_path / "eager"):
        run_steps(model, [optimizer], 2)
    graph, eager = (read_run(tmp_path / side).steps for side in ("graph", "eager"))
    assert sorted(graph) == sorted(eager) == [0, 1]
    assert sorted(graph[0]) == ["clip", "load", "optimiser"]
    for step in graph:
        for phase, entries in graph[step].items():
            assert entries == eager[step][phase], (step, phase)
