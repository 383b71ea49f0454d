"""``python -m pytest_gtrainer init``: a first test that is green, and no file that existed is
touched.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pytest_gtrainer import TrainConfig
from pytest_gtrainer.__main__ import main
from pytest_gtrainer.options import OPTIONS

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 5), nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).sin()
        return self.head(x)

def model():
    return nn.Sequential(nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 6))

def image():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))

class Two(Model):
    def forward(self, tokens, other):
        return super().forward(tokens) + other

class Pair(Model):
    def forward(self, tokens):
        return tokens, super().forward(tokens)

built = Model()

def parallel(mesh):
    from torch.distributed.fsdp import fully_shard
    return fully_shard(Model(), mesh=mesh["dp"])

def wrong(mesh):
    made = parallel(mesh)
    made.head.register_forward_hook(lambda module, args, output: 2 * output)
    return made
"""
FILES = ["test_gtrainer.py", "golden/README.md", ".github/workflows/gtrainer.yml"]


@pytest.fixture
def project(make_project):
    return make_project(MODEL)


def written():
    """The files of the repository beside its model."""
    return sorted(
        str(path)
        for path in Path().rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not path.name.startswith("model_")
    )


def run_tests(*arguments, **environ):
    ours = ("PYTEST_", "GT_", "CI")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "--gt-device=cpu"],
        env=kept | environ,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("factory", ["Model", "model"])
def test_the_command_that_it_names_is_green_and_so_is_the_job(project, capsys, factory):
    assert main(["init", f"{project}:{factory}", "--yes"]) == 0
    command = re.search(r"next: +python -m pytest (.+)", capsys.readouterr().out)[1].split()
    first = run_tests(*command)
    assert "goldens   1 created" in first, first
    assert "2 passed" in first
    workflow = Path(FILES[2]).read_text()
    job = re.search(r"- run: python -m pytest (.+)", workflow)[1].split()
    assert {flag.partition("=")[0] for flag in job if flag.startswith("--gt")} <= {
        option.flag for option in OPTIONS
    }
    again = run_tests(*job, CI="1")
    assert "goldens   1 equal" in again, again
    assert "2 passed" in again


@pytest.mark.parametrize("answer", ["n", "", "no", "Yes, please"])
def test_nothing_is_written_unless_the_answer_is_yes(project, capsys, monkeypatch, answer):
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    assert main(["init", f"{project}:Model"]) == 1
    told = capsys.readouterr()
    assert told.out == "".join(f"writes  {file}\n" for file in FILES)
    assert told.err == "init: nothing was written; --yes writes without asking\n"
    assert written() == []


def test_without_anybody_to_answer_nothing_is_written(project, capsys, monkeypatch):
    def nobody(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    assert main(["init", f"{project}:Model"]) == 1
    assert "--yes writes without asking" in capsys.readouterr().err
    assert written() == []


def test_it_says_what_it_wrote_and_what_comes_next(project, capsys, monkeypatch):
    Path("tests").mkdir()
    Path("pyproject.toml").write_text("[project]\nname = 'a'\n")
    monkeypatch.setattr("builtins.input", lambda prompt: "Y")
    assert main(["init", f"{project}:Model"]) == 0
    out = capsys.readouterr().out
    files = ["tests/test_gtrainer.py", *FILES[1:]]
    for file in files:
        assert f"wrote   {file}\n" in out
    assert "next:   python -m pytest tests/test_gtrainer.py --gt-update-goldens" in out
    assert written() == sorted([*files, "pyproject.toml"])
    text = Path(files[0]).read_text()
    assert "torch.randint(0, 8, (2, 8))" in text
    assert '["embed", "head"]' in text
    assert '"$GTRAINER" -e .\n' in Path(FILES[2]).read_text()


@pytest.mark.parametrize("kept", FILES)
def test_a_file_that_exists_is_kept(project, capsys, kept):
    Path(kept).parent.mkdir(parents=True, exist_ok=True)
    Path(kept).write_text("mine")
    assert main(["init", f"{project}:Model", "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"keeps   {kept}, which exists\n" in out
    assert f"wrote   {kept}" not in out
    assert Path(kept).read_text() == "mine"
    assert written() == sorted(FILES)
    before = {file: Path(file).read_text() for file in FILES}
    assert main(["init", f"{project}:Model", "--yes"]) == 0
    assert "nothing to write" in capsys.readouterr().out
    assert {file: Path(file).read_text() for file in FILES} == before


def test_a_link_to_nowhere_is_a_file_that_exists(project):
    Path(FILES[0]).symlink_to("elsewhere.py")
    assert main(["init", f"{project}:Model", "--yes"]) == 0
    assert not Path("elsewhere.py").exists()


def test_a_folder_that_cannot_be_made_is_one_sentence(project, capsys):
    Path("golden").write_text("a file")
    assert main(["init", f"{project}:Model", "--yes"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("init: golden/README.md was not written: ")
    assert "wrote   test_gtrainer.py" in told.out
    assert "next:" not in told.out
    assert Path("golden").read_text() == "a file"


@pytest.mark.parametrize(
    ("factory", "inputs"),
    [
        ("Model", "torch.randint(0, 8, (2, 8))"),
        ("model", "torch.randn(2, 6)"),
        ("image", "torch.randn(2, 3, 32, 32)"),
    ],
)
def test_inputs_are_guessed_and_tried(project, factory, inputs):
    from pytest_gtrainer.start.init import _inputs_of
    from pytest_gtrainer.start.model import build_model

    assert _inputs_of(build_model(f"{project}:{factory}"), None) == inputs


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{}:Two"], "nobody knows what this model takes: give its inputs as Python, --inputs"),
        (["{}:Pair"], "nobody knows what this model takes"),
        (["{}:Pair", "--inputs", "torch.randint(0, 8, (2, 8))"], "the model does not run with"),
        (["{}:Model", "--inputs", "torch.randn(2)"], "the model does not run with --inputs='torch"),
        (["{}:Model", "--inputs", "nonsense"], "the model does not run with --inputs='nonsense'"),
        (["{}:built"], "{}:built is a model: name a function or class that builds a new one"),
        (["{}:nobody"], "{} has no nobody"),
    ],
)
def test_a_model_that_cannot_be_tested_is_one_sentence(project, capsys, arguments, says):
    assert main(["init", *(each.format(project) for each in arguments), "--yes"]) == 2
    assert capsys.readouterr().err.startswith(f"init: {says.format(project)}")
    assert written() == []


NAMED = """
from torch import nn

class C(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 3))

class B(C):
    pass

class A(C):
    tiny = B

    class of:
        tiny = C

{name} = A
"""


@pytest.mark.parametrize("outer", ["A", "model", "step", "batch", "torch", "TrainConfig"])
@pytest.mark.parametrize(("inner", "built"), [("", "A"), (".tiny", "B"), (".of.tiny", "C")])
def test_the_test_builds_the_model_that_was_named(make_project, outer, inner, built):
    """Names that the test uses itself are of the model all the same."""
    project = make_project(NAMED.format(name=outer))
    assert main(["init", f"{project}:{outer}{inner}", "--yes"]) == 0
    found = {}
    exec(Path(FILES[0]).read_text(), found)
    model = found["model"]()
    assert type(model).__name__ == built
    assert found["step"](model, *found["batch"](0, 0)).shape == ()
    assert (found["pytest"], found["torch"]) == (pytest, torch)
    assert found["TrainConfig"] is TrainConfig


def test_several_inputs_are_given_with_commas(project):
    inputs = "torch.randint(0, 8, (2, 8)), torch.randn(2, 8, 8)"
    assert main(["init", f"{project}:Two", "--inputs", inputs, "--yes"]) == 0
    assert f"return ({inputs},)" in Path(FILES[0]).read_text()


@pytest.mark.parametrize("answer", ["y", "Y", "yes", " YES ", "yEs"])
def test_any_yes_writes(project, monkeypatch, answer):
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt: asked.append(prompt) or answer)
    assert main(["init", f"{project}:Model"]) == 0
    assert asked == ["\nWrite? [y/N] "]
    assert written() == sorted(FILES)


@pytest.mark.parametrize(
    ("pyproject", "requirements", "installs"),
    [
        (None, False, ""),
        (None, True, " -r requirements.txt"),
        ("[project]\nname = 'a'\n", True, " -e ."),
        ("[build-system]\n", True, " -e ."),
        ("[tool.ruff]\n", True, " -r requirements.txt"),
        ("[tool.ruff]\n", False, ""),
        ("no toml", True, " -r requirements.txt"),
    ],
)
def test_the_job_installs_what_the_repository_says(project, pyproject, requirements, installs):
    if pyproject is not None:
        Path("pyproject.toml").write_text(pyproject)
    if requirements:
        Path("requirements.txt").write_text("")
    assert main(["init", f"{project}:Model", "--yes"]) == 0
    [line] = re.findall(r'pip install "\$GTRAINER"(.*)\n', Path(FILES[2]).read_text())
    assert line == installs


@pytest.mark.parametrize("where", ["", "tests/"])
def test_each_file_names_the_test_where_it_is(project, capsys, where):
    if where:
        Path("tests").mkdir()
    else:
        Path("tests").write_text("a file")
    assert main(["init", f"{project}:Model", "--yes"]) == 0
    test = f"{where}test_gtrainer.py"
    out = capsys.readouterr().out
    files = [test, *FILES[1:]]
    assert out.splitlines() == [
        *(f"writes  {file}" for file in files),
        *(f"wrote   {file}" for file in files),
        "",
        f"next:   python -m pytest {test} --gt-update-goldens",
        "        then read golden/, commit it, and run it again without the option",
    ]
    command = f"    python -m pytest {test} --gt-update-goldens\n"
    assert command in Path(FILES[1]).read_text()
    job = f"      - run: python -m pytest {test} --gt-require=ranks --gt-unused-goldens=fail\n"
    workflow = Path(FILES[2]).read_text()
    assert job in workflow
    assert "${{ vars.GTRAINER }}" in workflow


def test_a_file_that_comes_while_the_user_thinks_is_kept(project, capsys, monkeypatch):
    def answer(prompt):
        Path(FILES[0]).write_text("mine")
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    assert main(["init", f"{project}:Model"]) == 2
    assert Path(FILES[0]).read_text() == "mine"
    said = capsys.readouterr()
    assert said.err.startswith(f"init: {FILES[0]} was not written: ")
    assert "next:" not in said.out
    assert written() == FILES[:1]


class Logits:
    def __init__(self, logits):
        self.logits = logits


@pytest.mark.parametrize(
    ("forward", "inputs", "words"),
    [
        (lambda x: x, "torch.ones(2)", ""),
        (lambda x: Logits(x), "torch.ones(2)", ""),
        (lambda x, y: x + y, "torch.ones(2), torch.ones(2)", ""),
        (
            lambda x: (x, x),
            "torch.ones(2)",
            "it returns a tuple; name a model that returns a tensor",
        ),
        (lambda x: x.no, "torch.ones(2)", "AttributeError: 'Tensor' object has no attribute 'no'"),
        (lambda x: x, "os.getcwd()", "NameError: name 'os' is not defined"),
        (lambda x: sys.exit(3), "1", "SystemExit: 3"),
    ],
)
def test_a_model_runs_with_inputs_or_says_why_not(forward, inputs, words):
    from pytest_gtrainer.start.init import _fails

    assert _fails(forward, inputs) == words


@pytest.mark.parametrize(
    ("parts", "guesses"),
    [
        ([torch.nn.Linear(3, 9)], ["torch.randn(2, 3)", "torch.randn(2, 8, 3)"]),
        (
            [torch.nn.Tanh(), torch.nn.Embedding(7, 4), torch.nn.Linear(4, 2)],
            ["torch.randint(0, 7, (2, 8))", "torch.randn(2, 4)", "torch.randn(2, 8, 4)"],
        ),
        ([torch.nn.Conv2d(5, 6, 3)], ["torch.randn(2, 5, 32, 32)"]),
        ([torch.nn.Tanh()], []),
    ],
)
def test_inputs_are_guessed_from_the_first_modules(parts, guesses):
    from pytest_gtrainer.start.init import _guesses

    assert list(_guesses(torch.nn.Sequential(*parts))) == guesses


def test_a_sequence_is_guessed_where_rows_do_not_run(project):
    from pytest_gtrainer.start.init import _inputs_of

    class Positions(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.ones(8, 3)[: x.shape[1]][None, :, :]).view(2, 8, -1)

    assert _inputs_of(Positions(3, 4), None) == "torch.randn(2, 8, 3)"


@pytest.mark.second_tier
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("parallel", ["parallel", "wrong"])
def test_a_parallel_model_gets_a_test_against_the_unsharded_one(project, capsys, parallel):
    arguments = ["init", f"{project}:Model", "--parallel", f"{project}:{parallel}", "--yes"]
    assert main([*arguments, "--mesh", "dp=2"]) == 0
    test = "test_gtrainer_parallel.py"
    assert written() == [FILES[2], test]
    assert f"python -m pytest {test} --gt-require" in Path(FILES[2]).read_text()
    assert f"next:   python -m pytest {test}\n" in capsys.readouterr().out
    found = run_tests(test)
    assert ("1 passed" if parallel == "parallel" else "AnotherFunction") in found, found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "dp"], "--mesh='dp': give dimensions and their sizes, as dp=2,tp=2"),
        (["--mesh", "dp=2,dp=2"], "give dimensions and their sizes"),
        (["--mesh", "dp=1"], "on one rank nothing is parallel"),
        (["--parallel", "{}:Model"], "takes no mesh alone ("),
        (["--parallel", "{}:gone"], "has no gone"),
    ],
)
def test_what_is_no_parallel_model_is_refused(project, capsys, arguments, says):
    given = [argument.format(project) for argument in arguments]
    assert main(["init", f"{project}:Model", "--parallel", f"{project}:parallel", *given]) == 2
    assert says in capsys.readouterr().err
    assert written() == []


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("tp=2", ", data_dims=())"),
        ("dp=2,tp=2", ")"),
        ("fsdp=2", ", data_dims=('fsdp',))"),
        ("dp_replicate=2,dp_shard=2,cp=2", ", data_dims=('dp_replicate', 'dp_shard'))"),
        ("mine=2,pp=2", ", data_dims=('mine',))"),
    ],
)
def test_ranks_have_other_batches_unless_they_are_known_to_have_one(project, mesh, says):
    """With one batch too many, gradients that nobody reduces are those of the unsharded model."""
    arguments = ["init", f"{project}:Model", "--parallel", f"{project}:parallel", "--yes"]
    assert main([*arguments, "--mesh", mesh]) == 0
    assert f"mesh=gt_mesh{says}\n" in Path("test_gtrainer_parallel.py").read_text()


def test_a_mesh_of_no_parallel_model_is_refused(project, capsys):
    assert main(["init", f"{project}:Model", "--mesh", "tp=2", "--yes"]) == 2
    assert "--mesh is that of a parallel model: give --parallel, too" in capsys.readouterr().err
    assert written() == []


def test_a_job_that_is_there_and_does_not_name_the_test_is_said(project, capsys):
    arguments = ["init", f"{project}:Model", "--yes"]
    assert main(arguments) == 0
    assert "does not name" not in capsys.readouterr().out
    assert main([*arguments, "--parallel", f"{project}:parallel"]) == 0
    said = f"\n{FILES[2]} does not name test_gtrainer_parallel.py: add it, unless its folder runs\n"
    assert said in capsys.readouterr().out
