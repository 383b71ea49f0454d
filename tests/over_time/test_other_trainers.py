"""Trainers that copy their model, take several optimisers, closures, or odd inputs, are recorded as
they are.
"""

import copy
import pickle
import pickletools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from pytest_gtrainer import record_training
from pytest_gtrainer.over_time.comparing import compare_runs
from pytest_gtrainer.over_time.files import read_run
from tests.over_time.trainers import record


def made(optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return model, optimizer(model.parameters(), **{"lr": 0.1, **options})


def step(model, optimizer, x=None):
    if x is None:
        x = torch.ones(2, 4)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def compared(a, b):
    return compare_runs(read_run(a), read_run(b))


def test_a_model_is_copied_and_pickled_while_it_is_recorded(tmp_path):
    """A copy is not recorded, and a pickle is read where this package is not installed."""
    model, optimizer = made()
    with record_training(model, optimizer, tmp_path, activations="*") as recorder:
        step(model, optimizer)
        best = copy.deepcopy(model)
        saved = pickle.dumps(model)
        best(torch.ones(2, 4)).sum().backward()
        step(model, optimizer)
    assert recorder.recorded == 2
    (inputs,) = read_run(tmp_path).steps[1]["data"].values()
    assert len(inputs[0]) == 1
    named = [str(text) for _, text, _ in pickletools.genops(saved)]
    assert not [text for text in named if "pytest_gtrainer" in text]
    assert pickle.loads(saved)(torch.ones(2, 4)).shape == (2, 1)


@pytest.mark.parametrize("rates", [(0.1, 0.2), (0.2, 0.1)])
def test_the_options_of_each_of_two_optimisers(tmp_path, rates):
    """A rate of either one that is another is named."""

    def train(folder, rates):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizers = []
        for part, rate in zip(model, rates, strict=True):
            optimizers.append(torch.optim.SGD(part.parameters(), lr=rate))
        with record_training(model, optimizers, folder):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()

    train(tmp_path / "a", (0.1, 0.1))
    train(tmp_path / "b", rates)
    names = {each.name for each in compared(tmp_path / "a", tmp_path / "b").differences}
    rate = ["param_groups.0.lr", "optimizers.1.param_groups.0.lr"][rates[0] == 0.1]
    other = ["param_groups.0.lr", "optimizers.1.param_groups.0.lr"][rates[0] != 0.1]
    assert rate in names
    assert other not in names


def test_a_checkpoint_that_steps_an_optimiser_without_state(tmp_path):
    """torch steps plain SGD, with zeros, each time that its state is asked for."""

    def train(folder, saves):
        model, optimizer = made()
        with record_training(model, optimizer, folder) as recorder:
            for _ in range(3):
                step(model, optimizer)
                if saves:
                    get_state_dict(model, optimizer)
        return recorder.recorded

    assert train(tmp_path / "a", False) == train(tmp_path / "b", True) == 3
    assert compared(tmp_path / "a", tmp_path / "b").status == 0


def train_with_load(folder, change=None, at=2):
    """Load what was saved, or what ``change`` has made of it, before the step ``at``."""
    model, optimizer = made(torch.optim.Adam)
    with record_training(model, optimizer, folder):
        for number in range(4):
            if change is not None and number == at:
                state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                change(state)
                model.load_state_dict(state)
                optimizer.load_state_dict(optimizer.state_dict())
            step(model, optimizer)


def test_a_load_in_the_middle_of_a_run(tmp_path):
    """Z2: it is compared with what the step before has left on the other side; the same weights
    again are no difference.
    """
    train_with_load(tmp_path / "whole")
    train_with_load(tmp_path / "again", lambda state: None)
    train_with_load(tmp_path / "other", lambda state: state["1.bias"].zero_())
    assert "0.weight" in read_run(tmp_path / "again").steps[2]["load"]
    assert "load" not in read_run(tmp_path / "again").steps[3]
    for a, b in (("whole", "again"), ("again", "whole")):
        result = compared(tmp_path / a, tmp_path / b)
        assert result.status == 0, str(result)
    for a, b in (("whole", "other"), ("other", "whole"), ("again", "other")):
        first, *others = compared(tmp_path / a, tmp_path / b).differences
        assert str(first) == "step 2, load: 1.bias, rank 0"
        assert not others


@pytest.mark.second_tier("LBFGS")
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adam])
def test_a_closure_runs_the_backward_within_the_step(tmp_path, kind):
    """The first step of a resumed run has what each step of a whole run has."""

    def train(folder, first, last):
        model, optimizer = made(kind)
        x = torch.randn(8, 4)

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(first):
            optimizer.step(closure)
        with record_training(model, optimizer, folder) as recorder:
            for _ in range(first, last):
                optimizer.step(closure)
        assert recorder.recorded == last - first

    train(tmp_path / "whole", 0, 4)
    train(tmp_path / "resumed", 2, 4)
    whole, resumed = read_run(tmp_path / "whole"), read_run(tmp_path / "resumed")
    result = compare_runs(whole, resumed, at=2)
    assert result.status == 0, str(result)
    phases = whole.steps[1]
    assert phases["clip"] == phases["gradient"] != {}


def test_numbers_are_read_when_they_are_met(tmp_path):
    """A number of 64 bits keeps all of them, and the value that it had before the step."""

    def train(folder, count):
        model, _ = made()
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.0, dtype=torch.float64)))
        model.register_buffer("count", torch.tensor(count))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with record_training(model, optimizer, folder):
            loss = model(torch.ones(2, 4)).double().sum() * model.scale
            loss.backward()
            loss.detach().zero_()
            optimizer.step()

    train(tmp_path / "a", 2**60)
    train(tmp_path / "b", 2**60 + 1)
    phases = read_run(tmp_path / "a").steps[0]
    assert phases["load"]["scale"][0][0].numbers == ("1.0",)
    assert phases["loss"]["root"][0][0].numbers != ("0.0",)
    first = compared(tmp_path / "a", tmp_path / "b").differences[0]
    assert str(first) == f"step 0, load: count, rank 0: {2**60} in A, {2**60 + 1} in B"


def test_inputs_and_roots_without_values(tmp_path, capsys):
    """A sparse input, and a backward from an edge of the graph, do not end the recording."""
    model, optimizer = made()

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x.to_dense())

    dense = Dense()
    with record_training(dense, optimizer, tmp_path) as recorder:
        step(dense, optimizer, torch.ones(2, 4).to_sparse())
        loss = dense(torch.ones(2, 4).to_sparse()).sum()
        edge = torch.autograd.graph.get_gradient_edge(loss)
        torch.autograd.backward(edge, torch.ones(()))
        optimizer.step()
    assert recorder.recorded == 2
    assert not capsys.readouterr().err


@pytest.mark.second_tier
def test_a_group_that_is_added_late_and_a_module_that_is_wrapped_late(tmp_path):
    def train(folder, wrapped):
        model, optimizer = made()
        with record_training(model, optimizer, folder):
            step(model, optimizer)
            model.append(nn.Linear(1, 1))
            nn.init.ones_(model[2].weight)
            nn.init.ones_(model[2].bias)
            optimizer.add_param_group({"params": model[2].parameters()})
            if wrapped:
                model[0] = torch.compile(model[0], backend="eager")
            step(model, optimizer)

    train(tmp_path / "a", False)
    train(tmp_path / "b", True)
    names = read_run(tmp_path / "a").steps[1]["clip"]
    assert "2.weight" in names
    result = compared(tmp_path / "a", tmp_path / "b")
    assert result.status == 0, str(result)


def test_activations_are_chosen_without_the_names_of_wrappers(tmp_path, capsys):
    model, optimizer = made()
    whole = torch.compile(model, backend="eager")
    with record_training(whole, optimizer, tmp_path / "a", activations=["0", "layers.*"]):
        pass
    assert capsys.readouterr().err == "no module has a name like 'layers.*'\n"


def test_a_module_that_two_patterns_choose_is_recorded_once_and_misses_neither(tmp_path, capsys):
    model, optimizer = made()
    patterns = ["0", "[0]", "[01]", "1*"]
    with record_training(model, optimizer, tmp_path / "a", activations=patterns):
        step(model, optimizer)
    assert capsys.readouterr().err == ""
    forward = read_run(tmp_path / "a").steps[0]["forward"]
    assert {name: len(values[0]) for name, values in forward.items()} == {"0": 1, "1": 1}


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
{first}
generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
generators = torch.optim.SGD(generator.parameters(), lr=0.1)
critics = torch.optim.SGD(critic.parameters(), lr=0.1)
for step in range(3):
    fake = generator(torch.ones(2, 4))
    (critic(fake.detach()).sum() * {scale}).backward()
    critics.step()
    critics.zero_grad()
    critic(fake).sum().backward()
    generators.step()
    generators.zero_grad()
{last}
"""


def write(path, *, first="", scale=1.0, last=""):
    path.write_text(SCRIPT.format(first=first, scale=scale, last=last))
    return path


def test_two_models_that_train_each_other(tmp_path):
    """The second one is named, too, and both losses of a step are kept.

    A module that is older than the script has no part in it, nor in the numbers of names.
    """
    older = nn.Linear(1, 1)
    assert record(tmp_path / "a", write(tmp_path / "a.py")) == 0
    del older
    phases = read_run(tmp_path / "a").steps[1]
    assert len(phases["loss"]["root"][0]) == 2
    assert {"weight", "bias", "beside Linear.weight", "beside Linear.bias"} <= phases["clip"].keys()
    assert record(tmp_path / "b", write(tmp_path / "b.py", scale=2.0)) == 0
    result = compared(tmp_path / "a", tmp_path / "b")
    assert result.differences[0].phase == "loss"


@pytest.mark.second_tier
def test_a_model_that_nobody_trains_is_called_first(tmp_path):
    """Neither a teacher nor a first call before there is an optimiser is the training."""
    first = "teacher = nn.Linear(7, 7)\nteacher(torch.ones(1, 7))"
    assert record(tmp_path / "a", write(tmp_path / "a.py", first=first)) == 0
    phases = read_run(tmp_path / "a").steps[0]
    assert phases["gradient"].keys() == {"weight", "bias"}
    assert phases["load"]["weight"][0][0].shape == (4, 4)
    assert "data" in phases


@pytest.mark.second_tier("a status", "an end")
@pytest.mark.parametrize(
    ("last", "note"),
    [("raise SystemExit(3)", "SystemExit"), ("raise KeyError(1)", "KeyError"), ("exit()", None)],
    ids=["a status", "an error", "an end in order"],
)
def test_a_script_that_ends_in_another_way(tmp_path, last, note):
    """The recorder hands on what the script raises; ``exit()`` is an end in order."""
    script = write(tmp_path / "a.py", last=last)
    if note:
        with pytest.raises((SystemExit, KeyError)):
            record(tmp_path / "a", script)
        assert read_run(tmp_path / "a").notes == [f"rank 0 ended after step 2 by {note}"]
    else:
        assert record(tmp_path / "a", script) == 0
        assert not read_run(tmp_path / "a").notes


def test_every_counts_steps_and_not_calls(tmp_path):
    """A resumed run records the same steps as the whole one, and each run its first step."""

    def train(folder, first, every):
        model, optimizer = made(torch.optim.Adam)
        for _ in range(first):
            step(model, optimizer)
        with record_training(model, optimizer, folder, every=every):
            for _ in range(first, 7):
                step(model, optimizer)
                with torch.no_grad():
                    model(torch.zeros(2, 4))

    train(tmp_path / "a", 0, 3)
    train(tmp_path / "b", 2, 3)
    train(tmp_path / "c", 0, 100)
    assert list(read_run(tmp_path / "a").steps) == [0, 3, 6]
    assert list(read_run(tmp_path / "b").steps) == [2, 3, 6]
    assert list(read_run(tmp_path / "c").steps) == [0]
    assert compared(tmp_path / "a", tmp_path / "b").status == 0


def test_nothing_is_read_while_a_graph_of_the_device_is_captured(tmp_path, monkeypatch, capsys):
    """A copy to the host would break the capture."""
    model, optimizer = made()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with record_training(model, optimizer, tmp_path) as recorder:
        step(model, optimizer)
    assert recorder.recorded == 0
    assert not recorder.phases
    assert not capsys.readouterr().err


def test_a_model_inside_a_transform_does_not_end_the_recording(tmp_path, capsys):
    """Gradients of each row, as in private training, call the model with tensors of functorch."""
    model, optimizer = made()

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row,)).sum()

    of_rows = torch.func.vmap(torch.func.grad(loss), (None, 0))
    with record_training(model, optimizer, tmp_path) as recorder:
        for _ in range(2):
            parameters = {name: each.detach() for name, each in model.named_parameters()}
            of_rows(parameters, torch.ones(3, 4))
            step(model, optimizer)
    assert recorder.recorded == 2
    assert not capsys.readouterr().err
    assert "0.weight" in read_run(tmp_path).steps[1]["clip"]


UNSEEN = """
import torch
from torch import nn
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
torch.manual_seed(0)
whole = Whole()
optimizer = torch.optim.{optimizer}
def forward(x):
    return whole(x).sum()
{compiled}
for step in range(2):
    forward(torch.ones(2, 3)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def record_unseen(folder, compiled="", optimizer="SGD(whole.parameters(), lr=0.1)"):
    script = folder.with_suffix(".py")
    script.write_text(UNSEEN.format(compiled=compiled, optimizer=optimizer))
    assert record(folder, script) == 0
    return read_run(folder)


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        (
            "whole.compile(backend='eager')",
            "other compiled: nothing in A, the whole model in B",
        ),
        ("forward = torch.compile(forward, backend='eager')", "not compared: data, which only A"),
    ],
    ids=["in place", "around"],
)
def test_a_model_whose_forward_is_not_seen(tmp_path, compiled, said):
    """Z1: it has its own names; loss and gradients of each step, also the first, are kept."""
    torch._dynamo.reset()
    plain = record_unseen(tmp_path / "a")
    unseen = record_unseen(tmp_path / "b", compiled)
    for phases in unseen.steps.values():
        assert len(phases["loss"]["root"][0]) == 1
        assert "layers.1.weight" in phases["gradient"]
    result = compare_runs(plain, unseen)
    assert result.status == 0, str(result)
    assert said in str(result)
    assert "other model" not in str(result)


@pytest.mark.second_tier
def test_a_model_that_is_compiled_as_a_whole(tmp_path):
    """Z2: its class is the same; torch warns of hooks on all modules, which nobody has written."""
    torch._dynamo.reset()
    plain = record_unseen(tmp_path / "a")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        record_unseen(tmp_path / "b", "whole = torch.compile(whole, backend='eager')")
    assert not [each for each in seen if "global hooks" in str(each.message)]
    result = compare_runs(plain, read_run(tmp_path / "b"))
    assert result.status == 0
    assert "other compiled: nothing in A, the whole model in B" in str(result)
    assert "other model" not in str(result)


def test_a_loss_of_another_model_that_comes_first(tmp_path):
    """The critic learns first, from what the generator makes without gradients; nothing is lost."""
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
    with record_training(generator, optimizers, tmp_path, beside={"critic": critic}):
        for _ in range(3):
            with torch.no_grad():
                fake = generator(torch.ones(2, 4))
            critic(fake).sum().backward()
            optimizers[1].step()
            critic(generator(torch.ones(2, 4))).sum().backward()
            optimizers[0].step()
    losses = [len(phases["loss"]["root"][0]) for phases in read_run(tmp_path).steps.values()]
    assert losses == [1, 2, 2, 1]


def test_the_class_of_an_optimiser_and_its_rate_as_a_tensor(tmp_path):
    """Z2: the classes are said first; a number is compared with a tensor by its value."""
    record_unseen(tmp_path / "a")
    record_unseen(tmp_path / "b", optimizer="Adam(whole.parameters(), lr=torch.tensor(0.5))")
    result = str(compared(tmp_path / "a", tmp_path / "b"))
    assert "other optimizers: SGD in A, Adam in B\n" in result
    assert "param_groups.0.lr, rank 0: 0.1 in A, 0.5 as f32[] in B\n" in result


def test_lines_of_the_trainer_around_what_differs(tmp_path):
    """Z2: gradients change between the backward and the step, which stand elsewhere in B."""
    record_unseen(tmp_path / "a")
    record_unseen(tmp_path / "b", "whole.layers[0].weight.requires_grad_(False)\n")
    lines = str(compared(tmp_path / "a", tmp_path / "b")).splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("first"))
    assert "gradient: layers.0.weight: only in A" in lines[place]
    assert lines[place + 1] == ("  A: backward at a.py:19 in <module>, step at a.py:20 in <module>")
    assert lines[place + 2] == ("  B: backward at b.py:20 in <module>, step at b.py:21 in <module>")


@pytest.mark.parametrize("later", [0, 1], ids=["the first", "the last"])
def test_a_resumed_run_counts_from_the_parameter_that_has_taken_most_steps(tmp_path, later):
    """One was frozen for a while, so its optimiser has stepped less often."""
    model, optimizer = made(torch.optim.Adam)
    model[later].requires_grad_(False)
    step(model, optimizer)
    model[later].requires_grad_(True)
    step(model, optimizer)
    step(model, optimizer)
    with record_training(model, optimizer, tmp_path / "a") as recorder:
        step(model, optimizer)
        step(model, optimizer)
    assert list(read_run(tmp_path / "a").steps) == [3, 4]
    assert recorder.recorded == 2


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 2])
def test_a_step_of_several_optimisers_counts_once(tmp_path, number, every):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(number)))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    with record_training(model, optimizers, tmp_path / "a", every=every) as recorder:
        for _ in range(4):
            # Two backwards are accumulated.
            for scale in (1.0, 2.0):
                (scale * model(torch.ones(2, 4)).sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    run = read_run(tmp_path / "a")
    assert recorder.recorded == len(run.steps) == 4 // every
    assert list(run.steps) == list(range(0, 4, every))
    for phases in run.steps.values():
        losses = phases["loss"]["root"][0]
        assert len(losses) == len({each.numbers for each in losses}) == 2
        names = {name for name in phases["optimiser"] if "param_groups" not in name}
        assert names == {name for name, _ in model.named_parameters()}
