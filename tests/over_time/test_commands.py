"""``record`` and ``compare`` report how a script ends: statuses and sentences."""

import argparse
import os
import sys

import pytest

from pytest_gtrainer.over_time import commands
from pytest_gtrainer.over_time.arguments import add_commands


class Recorded:
    """Stands for a recorder that has recorded so many steps."""

    steps, fails = 1, False

    def __init__(self, folder, *, every, activations, values):
        self.given = folder, every, activations, values
        self.recorded, self.has_failed, self.log = self.steps, self.fails, []
        Recorded.last = self

    def start(self):
        self.log.append("start")

    def stop(self, error=None):
        self.log.append(error)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Run a script of this text, and return the status or what ended it."""
    monkeypatch.setattr(commands, "Recorder", Recorded)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(text, *arguments, steps=1, fails=False):
        monkeypatch.setattr(Recorded, "steps", steps)
        monkeypatch.setattr(Recorded, "fails", fails)
        script = tmp_path / "train.py"
        script.write_text(text)
        try:
            return commands.run(parsed("record", str(script), *arguments))
        except BaseException as error:
            return error

    return run


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(dest="command"))
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("steps", "fails", "status"), [(1, False, 0), (0, False, 2), (3, True, 0), (0, True, 2)]
)
@pytest.mark.parametrize("text", ["", "exit()", "exit(0)", "raise SystemExit"])
def test_the_status_of_a_script_that_ends_in_order(record, capsys, text, steps, fails, status):
    assert record(text, steps=steps, fails=fails) == status
    assert Recorded.last.log == ["start", None, *[None] * bool(text)]
    said = capsys.readouterr().err
    words = "has stepped after a backward, or with new gradients that are not 0\n"
    assert said.endswith(words) == (status == 2 and not fails)
    assert not said or said.startswith("nothing of ")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("exit(3)", SystemExit),
        ("exit('no')", SystemExit),
        ("{}['a']", KeyError),
        ("raise KeyboardInterrupt", KeyboardInterrupt),
    ],
)
def test_a_script_that_ends_otherwise_ends_the_command_as_it_would_end(record, text, kind):
    ended = record(text)
    assert type(ended) is kind
    assert Recorded.last.log == ["start", ended]


def test_a_script_finds_its_arguments_and_folder_as_without_a_recorder(record, tmp_path, capsys):
    record("import sys; print(__name__, sys.argv[1:], sys.path[0])", "--to", "x", "--every=2")
    assert capsys.readouterr().out == f"__main__ ['--to', 'x', '--every=2'] {tmp_path}\n"
    assert Recorded.last.given == ("record", 1, [], False)


def test_options_of_the_recorder_stand_before_the_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "Recorder", Recorded)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_module_x.py").write_text("import sys; print(sys.argv[1:], sys.path[0])")
    monkeypatch.chdir(tmp_path)
    options = ["--to=to", "--every", "3", "--activations=a", "--activations", "b", "--values"]
    assert commands.run(parsed("record", *options, "-m", "own_module_x", "-m", "1")) == 0
    assert Recorded.last.given == ("to", 3, ["a", "b"], True)
    assert capsys.readouterr().out == f"['-m', '1'] {os.getcwd()}\n"
    assert commands.run(parsed("record", "none.py")) == 2
    assert capsys.readouterr().err == "there is no script none.py\n"


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ([], {"at": None, "all": False, "page": None, "markdown": False}),
        (
            ["--at=3", "--all", "--page=p.html", "--markdown"],
            {"at": 3, "all": True, "page": "p.html", "markdown": True},
        ),
    ],
)
def test_arguments_of_compare(arguments, given):
    found = vars(parsed("compare", "x", "y", *arguments))
    assert found == {"command": "compare", "a": "x", "b": "y", **given}
