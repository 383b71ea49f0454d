"""Messages arrive as they were sent, and equal reports are equal bytes."""

from __future__ import annotations

import pytest

from pytest_gtrainer.worlds.ranks import wire

STATE = wire.GroupState(True, 2, 1, {"all ranks": 3})
WARNING = wire.WarningRecord("old", ("builtins", "UserWarning"), "test_it.py", 3, "runtest", "test_it.py::test_a", None)
ITEM = wire.ItemRef("test_it.py::test_a[\udc80 é]", ("/tests", "/tests/test_it.py"))


class Text(str):
    """Not a plain text: a rank may get one from a test."""


@pytest.mark.parametrize(
    "message",
    [
        wire.RunItem(ITEM, None, ("test_it.py", None, "test_a")),
        wire.RunItem(ITEM, ITEM),
        wire.ItemDone(b"reports", ((1.0, 2.0, 1.0),), (WARNING,), None, STATE, ("a process group",)),
        wire.ItemDone(b"", (), (), "broke off", wire.GroupState(False, 0)),
        wire.ItemDone(b"", (), (WARNING._replace(text=Text("mine")),), None, STATE),
        wire.CallDone(b"result", None, "", ({"kind": "leak"},), STATE),
        wire.Stop(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(message: object) -> None:
    arrived = wire.decode(wire.encode(message))
    assert arrived == message
    assert type(arrived) is type(message)


def test_equal_reports_are_equal_bytes() -> None:
    """Also where one of them holds the same object twice."""
    once = ["".join(["te", "xt"])] * 2
    twice = ["".join(["te", "xt"]), "".join(["te", "xt"])]
    assert wire.pack(once) == wire.pack(twice)
    assert wire.unpack(wire.pack(once)) == twice
    assert wire.pack(["text"]) != wire.pack(["texts"])
