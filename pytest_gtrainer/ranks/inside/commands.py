"""The loop of a rank: take a command of the parent, obey, answer."""

from __future__ import annotations

import functools
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pytest_gtrainer import facts
from pytest_gtrainer._pytest_private import tear_down
from pytest_gtrainer._torch.process import forget_compiled
from pytest_gtrainer.numerics.determinism import seed_everything
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.channel import Channel
from pytest_gtrainer.ranks.inside.collection import Collection, CollectionDiffers
from pytest_gtrainer.ranks.inside.group import RankGroup
from pytest_gtrainer.ranks.inside.recorder import Recorder, cut, plain, raised, summary_of
from pytest_gtrainer.ranks.inside.session import capture_fds, close_session, make_session
from pytest_gtrainer.worlds import hygiene


def serve(setup: wire.RankSetup, channel: Channel) -> int:
    """Start as a rank, then obey until told to stop: the exit status."""
    torch.set_num_threads(1)
    send = in_this_process(lambda message: channel.send(pickle.dumps(message)))
    try:
        group = RankGroup(setup.rank, setup.device, setup.backend)
        group.join(setup.store, setup.size)
        rank = Rank(make_session(setup), group, send)
    except BaseException:
        send(wire.StartFailed(traceback.format_exc()))
        return 1
    send(wire.Up(capture_fds(rank.config)))
    while True:
        try:
            command = pickle.loads(channel.receive())
        except EOFError:
            return 0  # the parent is gone
        answer = rank.obey(command)
        send(answer)
        if isinstance(answer, wire.Stopped):
            return 0


def in_this_process(send: Callable[[object], None]) -> Callable[[object], None]:
    """``send``, which ends any other process: a test that forks and lets the child return.

    The child has the rank's connection; its answers would be taken for the rank's own.
    """
    own = os.getpid()

    def guarded(message: object) -> None:
        if os.getpid() != own:
            os._exit(1)
        send(message)

    return guarded


class Rank:
    """A pytest session on a process group."""

    def __init__(self, session: pytest.Session, group: RankGroup, send: Callable[[object], None]) -> None:
        """Take over a session; ``send`` takes messages that must not wait."""
        self.session, self.group, self.send = session, group, send
        self.config = session.config
        self.collection = Collection(self.session)
        self.recorder = Recorder(self.config, send)
        self.config.pluginmanager.register(self.recorder, "gtrainer-rank-recorder")

    @functools.singledispatchmethod
    def obey(self, command: Any) -> object:
        raise TypeError(f"no such command: {command!r}")

    @obey.register
    def run_item(self, command: wire.RunItem) -> wire.ItemDone:
        memory = self.group.memory()
        trouble = self._run(command)
        forget_compiled()
        reports, times, warnings = self.recorder.take()
        return wire.ItemDone(reports, times, warnings, trouble, self.group.state(), self.group.left_behind(memory))

    def _run(self, command: wire.RunItem) -> str | None:
        """Run the whole protocol of a test; what stopped it, if something outside a phase did."""
        seed_everything(hygiene.SEED, later=False)
        try:
            item = self.collection.find(command.item)
            following = self._following(command.next_item)
            if command.location is not None:
                vars(item).setdefault("location", command.location)  # a cached property, which reads the source
            # The parent may have changed its mind about what comes after the last test.
            tear_down(self.session, item)
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except CollectionDiffers as error:
            return f"does not find the test: {error}"
        except pytest.exit.Exception as error:
            return f"called pytest.exit: {error}"
        except BaseException as error:
            return f"broke off: {summary_of(error)}"
        return None

    def _following(self, ref: wire.ItemRef | None) -> pytest.Item | None:
        try:
            return self.collection.find(ref) if ref is not None else None
        except CollectionDiffers:
            return None  # its own turn will tell

    @obey.register
    def call_function(self, command: wire.CallFunction) -> wire.CallDone:
        seed_everything(hygiene.SEED, later=False)
        with facts.collecting() as seen:
            result, error = self._attempt(command)
        forget_compiled()
        return wire.CallDone(result, error, self._written(), tuple(plain(seen)), self.group.state())

    def _attempt(self, command: wire.CallFunction) -> tuple[bytes | None, str | None]:
        """The pickled result, or the traceback of what was raised."""
        try:
            return self._call(command), None
        except BaseException as error:
            self.send(raised("call", pytest.ExceptionInfo.from_exception(error)))
            return None, _traceback_below_here(error)

    def _call(self, command: wire.CallFunction) -> bytes:
        self.collection.load(command.chain)
        function, args = pickle.loads(command.payload)
        with hygiene.restored(), self._captured():
            return _pickled(function(*args))

    @contextmanager
    def _captured(self) -> Iterator[None]:
        """As pytest does around a phase; collecting, too, leaves the capture suspended."""
        manager = self.config.pluginmanager.getplugin("capturemanager")
        if manager is None:
            yield
            return
        manager.resume_global_capture()
        try:
            yield
        finally:
            manager.suspend_global_capture()

    def _written(self) -> str:
        manager = self.config.pluginmanager.getplugin("capturemanager")
        if manager is None:
            return ""
        written = manager.read_global_capture()
        return cut(written.out + written.err)

    @obey.register
    def leave_group(self, command: wire.LeaveGroup) -> wire.LeftGroup:
        self.group.leave()
        return wire.LeftGroup()

    @obey.register
    def join_group(self, command: wire.JoinGroup) -> wire.JoinedGroup:
        self.group.join(command.store, command.size)
        return wire.JoinedGroup()

    @obey.register
    def drop_subgroups(self, command: wire.DropSubgroups) -> wire.DroppedSubgroups:
        self.group.drop_subgroups()
        return wire.DroppedSubgroups()

    @obey.register
    def stop(self, command: wire.Stop) -> wire.Stopped:
        error = None
        try:
            close_session(self.session)
        except BaseException as failure:
            error = summary_of(failure)
        return wire.Stopped(error)


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result, of type {type(result).__name__}, cannot be pickled ({error}): "
            "return tensors, numbers, strings, and containers of them"
        ) from None


def _traceback_below_here(error: BaseException) -> str:
    """The traceback without this module's own frames on top."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename == __file__ and shown.tb_next is not None:
        shown = shown.tb_next
    return "".join(traceback.format_exception(type(error), error, shown))
