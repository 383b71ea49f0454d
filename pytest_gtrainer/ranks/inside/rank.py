"""A rank's process: its process groups, kept warm between tests, and the loop that runs commands.

``serve`` is the entry. It reads commands of ``wire`` from the parent, lets a ``Rank`` run them, and
sends the answers. ``RankGroup`` makes and ends the process groups, and counts what tests issue on
them, because the parent compares the counts of all ranks.
"""

import _thread
import contextlib
import copy
import gc
import json
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pytest_gtrainer import facts
from pytest_gtrainer._pytest_private import (
    capture_fds,
    prepared_config,
    tear_down,
    warn_of_unhandled,
)
from pytest_gtrainer._torch import process_groups
from pytest_gtrainer._torch.process import forget_cublas_workspaces
from pytest_gtrainer.environment import variable
from pytest_gtrainer.marker import SHARED
from pytest_gtrainer.numerics.determinism import seed_everything
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.answers import (
    CALLS_SIGNAL,
    KEPT,
    OUTPUT_SIGNAL,
    STACK_SIGNAL,
    Call,
    file_of,
    stacks_text,
)
from pytest_gtrainer.ranks.inside import debugger, session
from pytest_gtrainer.ranks.inside.messages import Counts, count_messages
from pytest_gtrainer.ranks.inside.session import CollectedTests, CollectionDiffers, Recorder
from pytest_gtrainer.report.repeats import IS_OBSERVED
from pytest_gtrainer.swallowed import FailedChecks, chain_of, raised_at_the_end
from pytest_gtrainer.worlds import hygiene

# The parent's limit for a test ends a blocked collective long before this does.
COLLECTIVE_LIMIT = timedelta(hours=24)

# How many of the last calls of a test are compared between ranks. Reading the recorder takes 5
# microseconds for each call in it, after each test that communicates.
_RECORDED = "64"
MEMORY_TOLERANCE = 2**20

# How errors of torch and of this package name a process group that does not exist. The words
# "group 145" by themselves may mean a group of parameters.
_NAMES_A_GROUP = (
    re.compile(r"process group registered under the name ['\"]?([\w:]+)"),
    re.compile(r"process group ['\"]([^'\"]+)['\"]"),
    re.compile(
        r"(?:^|\b(?:process|the|of|in|on|over|for|to)\s+)group ['\"]?(\d+)\b",
        re.MULTILINE | re.IGNORECASE,
    ),
)
_SHOWS_A_GROUP = re.compile(r"\bProcessGroup object at (0x[0-9a-f]+)")
_MESH_GROUPS = "mesh_"


def serve(setup: wire.RankSetup, channel: wire.Channel) -> int:
    """Start as a rank, run commands until one of them stops it, and return the exit status."""
    torch.set_num_threads(1)
    own = os.getpid()

    def send(message: object) -> None:
        # A test has forked and let the child return: its answers would be taken for the rank's.
        if os.getpid() != own:
            os._exit(1)
        channel.send(pickle.dumps(message))

    try:
        group = RankGroup(
            setup.rank, setup.device, setup.backend, index=setup.rank - setup.ranks.start
        )
        group.join(setup.store, setup.size)
        rank = Rank(
            session.start_session(prepared_config(setup.args), setup.worker, setup.basetemp),
            group,
            send,
        )
        _thread.start_new_thread(
            _answer_parent, (rank, file_of(setup.folder, setup.rank, "answers"))
        )
    except BaseException:
        send(wire.Started(traceback.format_exc()))
        return 1

    def ask(prompt: wire.AtPrompt) -> wire.Terminal:
        send(prompt)
        answer: wire.Terminal = pickle.loads(channel.receive())
        return answer

    debugger.connect(setup.rank, ask, lambda: send(wire.PromptOver()), rank.session)
    send(wire.Started(None, capture_fds(rank.session.config)))
    answer: object = None
    # The parent judges controls over all ranks; it may also be gone.
    with facts.watching({"control": lambda **_: None}), contextlib.suppress(EOFError):
        while not isinstance(answer, wire.Stopped):
            answer = rank.obey(pickle.loads(channel.receive()))
            send(answer)
    return 0


def _answer_parent(rank: "Rank", file: Path) -> None:
    """Write stacks, calls of collectives or output when the parent asks.

    In a thread of its own, since the main thread may be in a call that does not return.
    """
    main, own = threading.main_thread().ident, threading.get_ident()
    with file.open("w", buffering=1) as answers:
        while True:
            try:
                asked = signal.sigwait({CALLS_SIGNAL, OUTPUT_SIGNAL, STACK_SIGNAL})
                if asked == STACK_SIGNAL:
                    text = json.dumps(stacks_text(sys._current_frames(), main, own))
                elif asked == OUTPUT_SIGNAL:
                    text = json.dumps([rank.recorder.unreported()])
                else:
                    text = json.dumps(rank.group.calls())
            except Exception:  # groups may come and go meanwhile: it will be asked again
                text = "{"  # incomplete
            answers.write(f"{text}\n")


class Rank:
    """A pytest session on a process group; ``send`` takes messages that must not wait."""

    def __init__(
        self, own: pytest.Session, group: "RankGroup", send: Callable[[object], None]
    ) -> None:
        self.session, self.group, self._send = own, group, send
        self._tests = CollectedTests(own)
        self.recorder = Recorder(own.config, send, group.explain, group.check_ended_groups)
        self._has_reported_stop = False

    def obey(self, command: object) -> object:
        """Run a command; return its result, or the command itself if it has none."""
        match command:
            case wire.RunItem():
                return self._run_item(command)
            case wire.CallFunction():
                return self._call_function(command)
            case wire.Do("leave group"):
                self.group.leave()
            case wire.JoinGroup():
                self.group.join(command.store, command.size)
            case wire.Do("drop subgroups"):
                self.group.drop_subgroups()
            case wire.Do("stop"):
                return wire.Stopped(session.close_session(self.session))
            case _:
                raise TypeError(f"no such command: {command!r}")
        return command

    def _run_item(self, command: wire.RunItem) -> wire.ItemDone:
        """Run the whole protocol of a test.

        The answer's ``trouble`` is what stopped it, if something outside of a phase did.
        """
        self.group.begin()
        memory, trouble = self.group.memory(), None
        seed_everything(hygiene.SEED)
        try:
            item, following = self._tests.find(command.item), None
            if command.next_item is not None:
                # If it is missing, the command that runs it says so.
                with contextlib.suppress(CollectionDiffers):
                    following = self._tests.find(command.next_item)
            if following is item:
                # A test that comes again does not keep the fixtures of the function.
                following = copy.copy(item)
            item.config.stash[IS_OBSERVED] = command.is_observed
            # A cached property of pytest, which would read the source.
            vars(item).setdefault("location", command.location)
            # The last command named the test that would come next; it may be another one now.
            tear_down(self.session, item)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except CollectionDiffers as error:
            trouble = f"does not find the test: {error}"
        except pytest.exit.Exception as error:
            trouble = f"called pytest.exit: {error}"
        except BaseException as error:
            trouble = f"broke off: {session.summary_of(error)}"
        # A hook asked for it. pytest lets nobody take it back, so it is reported once.
        asked = self.session.shouldfail or self.session.shouldstop
        if asked and not self._has_reported_stop:
            trouble = trouble or f"asked to stop the run: {asked}"
            self._has_reported_stop = True
        debugger.release()  # one may step past the end of a test
        process_groups.forget_compiled()
        shared = bool(self.session.config.stash.get(SHARED, ()))
        state, left = self.group.state(shared=shared), self.group.left_behind(memory, shared=shared)
        return wire.ItemDone(*self.recorder.take(), trouble, state, left)

    def _call_function(self, command: wire.CallFunction) -> wire.CallDone:
        self.group.begin()
        seed_everything(hygiene.SEED)
        capture = self.session.config.pluginmanager.getplugin("capturemanager")
        result = failure = None
        # The parent gives them again, under the filters of the test that called.
        with warnings.catch_warnings(record=True) as warned, facts.collecting() as seen:
            warnings.simplefilter("always")
            try:
                self._tests.load(command.chain)
                function, args = pickle.loads(command.payload)
                with hygiene.restored(), contextlib.ExitStack() as stack:
                    # As pytest does around a phase; collecting leaves it suspended.
                    if capture is not None:
                        stack.callback(capture.suspend_global_capture)
                        capture.resume_global_capture()
                    with raised_at_the_end(FailedChecks()):
                        value = function(*args)
                    self.group.check_ended_groups()
                    session.wait_for_gpu()
                    result = _pickled(value)
            except BaseException as error:
                self._send(session.raised(error))
                cause = self.group.explain(error)
                if cause is not None:
                    error.add_note(cause)
                # The traceback without this module's own frames on top.
                entry = error.__traceback__
                while entry is not None and entry.tb_next is not None:
                    if entry.tb_frame.f_code.co_filename != __file__:
                        break
                    entry = entry.tb_next
                failure = "".join(traceback.format_exception(type(error), error, entry))
            warn_of_unhandled(self.session.config)
        debugger.release()
        process_groups.forget_compiled()
        records = tuple(dict.fromkeys(map(session.record_of_warning, warned)))
        output = "".join(capture.read_global_capture()) if capture is not None else ""
        sent = tuple(session.plain(seen))
        return wire.CallDone(
            result, failure, session.cut(output), sent, records, self.group.state()
        )


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        wrong = f"the result, of type {type(result).__name__}, cannot be pickled ({error})"
        raise TypeError(
            f"{wrong}: return tensors, numbers, strings, and containers of them"
        ) from None


class RankGroup:
    """The default group of a rank, and the groups that tests have made besides it."""

    def __init__(self, rank: int, device: str, backend: str, *, index: int = 0) -> None:
        """``index`` is that of the rank's GPU on its machine."""
        self.rank, self.size = rank, 0
        self.device, self.backend, self._index = device, backend, index
        self._default: dist.ProcessGroup | None = None
        # When the rank joined the group, and began its present command: in ns since the epoch.
        self._joined = self._began = 0
        self._points = Counts()  # sends and receives, by group
        self._messages = Counts()  # sends less receives of this test, by group
        self._known = Counts()  # collectives that were reported already, by group
        self._before = Counts()  # collectives before the present test, by group
        self._ended: set[str] = set()  # names of groups of earlier tests
        # The objects of these groups that somebody still holds, with what was issued on them before
        # the present test.
        self._issued_on_ended: dict[weakref.ref[dist.ProcessGroup], int] = {}
        process_groups.silence_collective_log()
        if backend == "gloo":
            count_messages(self._points, self._messages)

    def join(self, place: str, size: int) -> None:
        """Make the default group anew, of ``size`` ranks.

        ``place`` is where they meet: the ``store`` of a ``wire.JoinGroup``.
        """
        if self.rank >= size:
            raise ValueError(
                f"rank {self.rank} cannot join a world of {size} ranks, which are 0..{size - 1}"
            )
        self.leave()
        self.size = size
        if self.device == "cuda":
            torch.cuda.set_device(self._index)
        store: dist.Store
        if os.path.isabs(place):
            store = dist.FileStore(place, size)
        else:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.PrefixStore(
                place, dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
            )
        size_kept = os.environ.get(process_groups.RECORDER_SIZE, _RECORDED)
        with variable(process_groups.RECORDER_SIZE, size_kept):
            dist.init_process_group(
                self.backend, store=store, rank=self.rank, world_size=size, timeout=COLLECTIVE_LIMIT
            )
        self._default = dist.group.WORLD
        self._joined = time.time_ns()
        if self.backend == "gloo":
            # gloo connects lazily. A rank that waits for one it has no connection with would not
            # notice that one's end.
            dist.all_to_all_single(torch.empty(size), torch.zeros(size))
            self._issued()

    def explain(self, error: BaseException) -> str | None:
        """Return a sentence if an exception names a process group of an earlier test.

        Exceptions that it was raised from, or while handling, count too.
        """
        message = "\n".join(map(session.str_of, chain_of(error)))
        live = process_groups.names_of_live_groups()
        names: set[str] = set()
        for pattern in _NAMES_A_GROUP:
            names.update(pattern.findall(message))
        stale = {}
        for name in sorted(names & self._ended - set(live.values())):
            stale[name] = f"Process group {name!r}"
        addresses = {hex(id(group)) for group in live}
        for address in sorted(set(_SHOWS_A_GROUP.findall(message)) - addresses):
            stale[address] = f"The process group at {address}"
        if not stale:
            return None
        return _where_kept(stale)

    def check_ended_groups(self) -> None:
        """Fail a test that has used a group of an earlier test as an object.

        gloo still sends on it, so it may even give the right values, but nobody compares such calls
        between ranks; with NCCL the test would hang.
        """
        used = {}
        for reference, before in self._issued_on_ended.items():
            group = reference()
            if group is not None and process_groups.issued_on(group) > before:
                used[hex(id(group))] = "A process group on which the test has called a collective"
        if used:
            pytest.fail(_where_kept(used), pytrace=False)

    def leave(self) -> None:
        """Destroy all groups, which makes ranks that are blocked with this one raise."""
        self._end(process_groups.live_groups())
        self._default = None
        self._points.clear()
        self._messages.clear()
        self._known.clear()
        if not dist.is_initialized():
            return
        with contextlib.suppress(RuntimeError):  # the peers may be gone already
            if self.backend == "nccl":
                # Destroying waits for collectives that will never end.
                process_groups.abort_all_groups()
            else:
                dist.destroy_process_group()
        _forget_last_error()
        # gloo closes its connections only with the last reference, that of a test's model too.
        gc.collect()

    def _end(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Note groups that are about to be destroyed: code that holds one can still use it."""
        names = process_groups.names_of_live_groups()
        for group in groups:
            self._ended.add(names[group])
            # A fake group counts nothing, and its collectives reach nobody.
            if dist.get_backend(group) != "fake":
                self._issued_on_ended[weakref.ref(group)] = 0

    def state(self, *, shared: bool = False) -> wire.GroupState:
        """Return what the test issued on the groups that exist, to be compared with other ranks."""
        broken = self.device == "cuda" and self._has_lost_gpu()
        if broken or not self._is_intact():
            return wire.GroupState(intact=False, groups_made=0, shared=shared, broken=broken)
        subgroups = len(process_groups.live_groups()) - 1
        issued, messages = self._issued()
        made, kinds = process_groups.groups_made(), {}
        if any(issued.values()):
            kinds = self._kinds()
        return wire.GroupState(
            True, made, subgroups, issued, shared, messages=messages, kinds=kinds
        )

    def _has_lost_gpu(self) -> bool:
        try:
            torch.cuda.current_stream().query()
        except RuntimeError:
            return True
        return False

    def _is_intact(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self._default

    def _issued(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return collectives, and sends less receives, since this was last asked.

        By the ranks of a group: its name may differ between ranks.
        """
        issued: dict[str, int] = {}
        messages: dict[str, int] = {}
        for group, label in self._labelled():
            balance = self._messages.pop(group, 0)
            if balance:
                messages[label] = balance
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                total = process_groups.issued_on(group) - self._points.get(group, 0)
                issued[label] = total - self._known.get(group, 0)
                self._known[group] = total
        return issued, messages

    def _kinds(self) -> dict[str, dict[int, int]]:
        """Return a checksum of each collective's kind, by label of its group and its number."""
        recorded = process_groups.recorded_calls(max(self._joined, self._began), lines=False)
        names = process_groups.names_of_live_groups()
        kinds: dict[str, dict[int, int]] = {}
        for group, label in self._labelled():
            own = kinds[label] = {}
            for _, number, *call in recorded.get(names[group], []):
                own[number] = zlib.crc32(repr(Call(*call).kind()).encode())
        return kinds

    def _labelled(self) -> Iterator[tuple[dist.ProcessGroup, str]]:
        """Yield the groups, each with a label that is the same on every rank."""
        same_ranks: Counter[str] = Counter()
        for group in process_groups.live_groups():
            label = self._label(group)
            same_ranks[label] += 1
            if same_ranks[label] > 1:
                label += f" (group {same_ranks[label]} of these)"
            yield group, label

    def _label(self, group: dist.ProcessGroup) -> str:
        if group is self._default:
            return "all ranks"
        ranks = dist.get_process_group_ranks(group)
        return "all ranks" if len(ranks) == self.size else "ranks " + ", ".join(map(str, ranks))

    def begin(self) -> None:
        """Begin a command: what is issued from now on is of its test."""
        self._began = time.time_ns()
        self._before = Counts(self._known)
        for reference in list(self._issued_on_ended):
            group = reference()
            if group is None:
                del self._issued_on_ended[reference]
            else:
                self._issued_on_ended[reference] = process_groups.issued_on(group)

    def calls(self) -> dict[str, Any]:
        """Return the last calls of collectives on each group, for ``ranks.answers.read_calls``."""
        recorded = process_groups.recorded_calls(self._joined)
        by_group = {}
        for group, name in process_groups.names_of_live_groups().items():
            own, ranks = recorded.get(name, []), dist.get_process_group_ranks(group)
            calls = [call for when, *call in own if when >= self._began]
            last, first = own[-1][1] if own else 0, calls[0][0] if calls else 0
            # The recorder may have lost the first calls of this test, and all on this group, as it
            # holds the last ones on any.
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                total = process_groups.issued_on(group) - self._points.get(group, 0)
                last = own[-1][1] if own else total
                first = last - (total - self._before.get(group, 0)) + 1
            by_group[name] = [self._label(group), ranks, last, first, calls[-KEPT:]]
        return by_group

    def memory(self) -> int:
        """Return the bytes that torch has allocated on this rank's GPU."""
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def left_behind(self, memory_before: int, *, shared: bool) -> tuple[str, ...]:
        """Return what a test has left: GPU memory, and groups.

        Groups of a DeviceMesh and of graph passes do not count: a test cannot destroy them.
        """
        left = []
        if self._is_intact() and not shared:
            for group, name in process_groups.names_of_live_groups().items():
                if group is self._default or group.group_desc.startswith(_MESH_GROUPS):
                    continue
                from pytest_gtrainer._torch.passes import is_extra_group

                if not is_extra_group(name):
                    left.append(f"a process group of {self._label(group)}")
        # cuBLAS keeps a workspace for a test's products, which is no leak.
        for free in (forget_cublas_workspaces, gc.collect):
            if self.memory() - memory_before > MEMORY_TOLERANCE:
                free()
        grown = self.memory() - memory_before
        if grown > MEMORY_TOLERANCE:
            left.append(f"{grown / 2**20:.0f} MiB of GPU memory")
        return tuple(left)

    def drop_subgroups(self) -> None:
        """Destroy every group of a test.

        It blocks while a collective is under way that another rank never issued.
        """
        if not self._is_intact():
            return
        made = [group for group in process_groups.live_groups() if group is not self._default]
        self._end(made)
        for group in made:
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)
        if made:
            process_groups.forget_groups(made)
            # gloo closes connections with the last reference: now, while ranks are idle.
            del made, group
            # The next test may make an equal mesh, whose groups are others.
            process_groups.forget_meshes()
            _forget_last_error()
            gc.collect()


def _where_kept(ended: Mapping[str, str]) -> str:
    """Return a sentence on each group of an earlier test, with the tables that still hold it.

    ``ended`` has the beginning of the sentence by the group's name or address.
    """
    sentences = []
    for group, subject in ended.items():
        sentences.append(
            f"{subject} was made by an earlier test in these processes, and has ended."
        )
        tables = process_groups.tables_that_name(group)
        if tables:
            sentences.append(
                f"It is still in {', '.join(tables)}: empty that where the world ends, in a "
                "fixture."
            )
        else:
            sentences.append(
                "No table of a module that holds it was found: a closure or a cache may."
            )
    sentences.append(
        "--gt-fresh-ranks=on-failure runs the test once more, on new ranks; "
        "--gt-fresh-ranks runs all so."
    )
    return "\n".join(sentences)


def _forget_last_error() -> None:
    """Drop the interpreter's references to the last traceback, whose frames may hold groups."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
