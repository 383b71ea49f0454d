"""Messages between nodes under torchrun are read only if signed, and cannot execute anything."""

import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from pytest_gtrainer.devices import Launch, launch_in
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.torchrun.line import Line, Refused, decode, encode, shared_key
from tests.worlds.test_torchrun import ENVIRONMENT

STATE = wire.GroupState(True, 1, 0, {"all ranks": 3})
WARNINGS = (
    wire.WarningRecord("old", ("builtins", "UserWarning"), "f.py", 3, "runtest", "", None),
    wire.WarningRecord("a", ("m", "W"), "g.py", 4, "runtest", "t", ("t.py", 1, "t")),
)
MESSAGES = [
    wire.StartTeam("team", 2, {"gt_size": 2, "mainargv": ["pytest", "-q"], "seed": 7}),
    wire.ToTeam(
        "team", "send", (wire.RunItem(wire.ItemRef("a", ("b",)), None, ("f", None, "d")), (1,))
    ),
    wire.ToTeam("team", "send", (wire.CallFunction(b"\x80\x00", ("a",)), (1,))),
    wire.FromRank(
        "team", 1, wire.ItemDone(({"a": (1, [2.5, None, True], "\udcff")},), (), None, STATE)
    ),
    wire.FromRank("team", 1, wire.CallDone(b"", None, "", ({"kind": "x"},), WARNINGS, STATE)),
    wire.FromRank(
        "team", 1, wire.Raised(1.5, "E", False, None, (1, 10**5000), (("f.py", 3), ("g.py", 4)))
    ),
    wire.FromRank("team", None, {1: "where", 2: ""}),
    wire.ToTeam("team", "kill"),
    wire.Do("stop"),
    wire.Over(1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_as_it_was_sent(message):
    assert decode(encode(message)) == message
    assert type(decode(encode(message))) is type(message)


def test_what_cannot_be_sent_is_told_by_name():
    with pytest.raises(
        TypeError, match=r"Launch, the type of Launch.*, cannot be sent to another node"
    ):
        encode(wire.ToTeam("team", "send", (Launch(0, 1, 0, 1), (1,))))


class Command:
    """A pickle of it runs a command where it is read."""

    def __reduce__(self):
        return os.mkdir, ("owned",)


@pytest.mark.parametrize(
    "data",
    [pickle.dumps(Command()), b"[1", b'{"Popen": ["x"]}', b'{"Stop": [1]}', b'{"a": 1, "b": 2}'],
)
def test_what_is_no_message_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused, match="what came from another node is no message"):
        decode(data)
    assert not (tmp_path / "owned").exists()


def test_the_pickle_of_these_tests_would_run_a_command(tmp_path, monkeypatch):
    """The twin."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Command()))
    assert (tmp_path / "owned").exists()


def ends(here=b"secret", there=b"secret"):
    """Both ends of a connection, or what they raised: rank 0's, a node's."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        node = pool.submit(
            lambda: Line(socket.create_connection(server.getsockname()), there, rank_0=False)
        )
        rank_0 = pool.submit(lambda: Line(server.accept()[0], here, rank_0=True))
        return [future.exception() or future.result() for future in (rank_0, node)]


def test_both_ends_of_a_line_hear_each_other():
    rank_0, node = ends()
    for message in MESSAGES:
        rank_0.send(message)
        assert node.take() == [message]
        node.send(message)
        assert rank_0.take() == [message]


def test_who_does_not_have_the_key_is_refused_by_name():
    for error in ends(there=b"another"):
        assert isinstance(error, Refused), error
        assert (
            "127.0.0.1 does not have the key of this run, and is not heard; set GT_TORCHRUN_KEY"
            in str(error)
        )


def wrongly_signed(line):
    """Faults of a connection, by name: a function that sends a wrong message from the end
    ``line``.
    """
    message = encode(wire.Do("stop"))
    return {
        "a pickle": lambda: line._channel.send(pickle.dumps(Command()) * 2),
        "another signature": lambda: line._channel.send(bytes(32) + message),
        "no signature": lambda: line._channel.send(message),
    }


@pytest.mark.parametrize("what", ["a pickle", "another signature", "no signature"])
def test_a_message_with_a_wrong_signature_is_refused(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rank_0, node = ends()
    wrongly_signed(node)[what]()
    with pytest.raises(
        Refused,
        match="a message on a connection between nodes is not signed with the key of this run",
    ):
        rank_0.take()
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("whose", ["its own", "the other's"])
def test_a_message_said_again_is_refused(whose):
    """Neither end's messages are good a second time, or for the end that has sent them."""
    rank_0, node = ends()
    sent = []
    send = node._channel.send
    node._channel.send = lambda data: (sent.append(data), send(data))
    node.send(wire.Do("stop"))
    assert rank_0.take() == [wire.Do("stop")]
    (rank_0 if whose == "the other's" else node)._channel.send(sent[0])
    with pytest.raises(Refused, match="not signed"):
        (node if whose == "the other's" else rank_0).take()


def test_the_key_is_the_environments_else_in_a_folder_that_only_its_user_enters(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GT_TORCHRUN_KEY", "said")
    assert shared_key() == b"said"
    monkeypatch.delenv("GT_TORCHRUN_KEY")
    assert shared_key() == shared_key() != b""
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.parent.rename(tmp_path / "elsewhere")
    file.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        Refused,
        match=r"no file for the key .*pytest-gtrainer.* is no folder.*: set GT_TORCHRUN_KEY",
    ):
        shared_key()


@pytest.mark.parametrize(
    ("content", "mode"),
    [("", 0o600), *(("k" * 64, mode) for mode in (0o666, 0o660, 0o620, 0o602))],
)
def test_a_key_that_is_short_or_that_others_can_write_is_refused(
    content, mode, tmp_path, monkeypatch
):
    monkeypatch.delenv("GT_TORCHRUN_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    key = shared_key()
    assert len(key) == 64
    file = tmp_path / ".cache/pytest-gtrainer/torchrun.key"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(
        Refused, match=r"torchrun.key is another user's, can be written by others, or is too short"
    ):
        shared_key()


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o644, 0o640])
def test_a_key_that_others_can_read_alone_is_taken(mode, tmp_path, monkeypatch):
    """The folder is the user's alone; who may write there could change the key."""
    monkeypatch.delenv("GT_TORCHRUN_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    key = shared_key()
    (tmp_path / ".cache/pytest-gtrainer/torchrun.key").chmod(mode)
    assert shared_key() == key


def test_the_launch_of_a_process():
    assert launch_in(ENVIRONMENT) == Launch(0, 4, 0, 4)
