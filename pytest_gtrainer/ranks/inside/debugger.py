"""pdb in a rank, at the terminal of the run.

One rank at a time has the terminal. Meanwhile the other ranks and the clock of the test are held.
"""

import pdb
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import IO, Any

import pytest
import torch.distributed as dist

from pytest_gtrainer.ranks import wire


class RankPdb(pdb.Pdb):
    """pdb that asks the parent for the terminal.

    pytest makes a new one for each ``breakpoint()``, so their common state stands in the class.
    """

    rank = 0
    ask: Callable[[wire.AtPrompt], wire.Terminal]
    leave: Callable[[], object]
    held: tuple[IO[str], IO[str]] | None = None

    def __init__(self, **how: Any) -> None:
        super().__init__(nosigint=True, **how)
        self.prompt, self.use_rawinput = f"(Pdb rank {self.rank}) ", False
        self.failure: str | None = None

    def interaction(self, *args: Any) -> None:
        """Prompt, unless the parent lets this rank go on."""
        if RankPdb.held is None:
            terminal = RankPdb.ask(wire.AtPrompt(self.failure))
            if terminal.refusal is not None:
                raise RuntimeError(terminal.refusal)
            if terminal.path is None:
                super().set_continue()
                return
            reader = open(terminal.path)  # noqa: SIM115
            RankPdb.held = reader, open(terminal.path, "w", buffering=1)  # noqa: SIM115
        self.stdin, self.stdout = RankPdb.held
        super().interaction(*args)

    def do_quit(self, arg: str) -> bool | None:
        """End the run; the end of input does it, too."""
        self.set_quit()
        pytest.exit("Quitting debugger")

    do_q = do_exit = do_EOF = do_quit

    def set_continue(self) -> None:
        super().set_continue()
        release()

    def set_quit(self) -> None:
        super().set_quit()
        release()


def release() -> None:
    """Give the terminal back, if this rank has it."""
    if RankPdb.held is not None:
        for file in RankPdb.held:
            file.close()
        RankPdb.held = None
        RankPdb.leave()


def connect(
    rank: int,
    ask: Callable[[wire.AtPrompt], wire.Terminal],
    leave: Callable[[], object],
    session: pytest.Session,
) -> None:
    """Let ``breakpoint``, ``--trace``, ``--pdb`` and ``dist.breakpoint`` of this rank enter
    ``RankPdb``.
    """
    RankPdb.rank, RankPdb.ask, RankPdb.leave = rank, staticmethod(ask), staticmethod(leave)
    session.config.option.usepdb_cls = (__name__, RankPdb.__name__)
    if session.config.workerinput["gt_pdb"]:  # type: ignore[attr-defined]
        session.config.pluginmanager.register(_PostMortem(), "gtrainer-post-mortem")

    passed: Counter[object] = Counter()

    def on_one_rank(rank: int = 0, skip: int = 0, timeout_s: float | None = None) -> None:
        """Stop on one rank, as torch's function does, after the first ``skip`` calls of a line.

        The others wait for it without a limit.
        """
        frame = sys._getframe(1)
        passed[frame.f_code, frame.f_lineno] += 1
        if passed[frame.f_code, frame.f_lineno] <= skip:
            return
        if dist.get_rank() == rank:
            debugger = RankPdb()
            debugger.reset()
            debugger.interaction(frame, None)
            if RankPdb.held is not None:
                # The user goes on by steps, in the function that stopped and in its callers.
                for outer, _ in traceback.walk_stack(frame):
                    outer.f_trace = debugger.trace_dispatch
                sys.settrace(debugger.trace_dispatch)
        dist.barrier()

    # Torch's function opens /dev/stdin, which a rank does not have, and has no setting for the
    # debugger, so it is replaced. Only in ranks, and put back when the session of the rank ends.
    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "breakpoint", on_one_rank, raising=False)
    session.config.add_cleanup(patch.undo)


class _PostMortem:
    """``--pdb``: the parent gives the terminal to the first rank that fails."""

    def pytest_exception_interact(
        self, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        assert call.excinfo is not None
        debugger = RankPdb()
        debugger.failure = report.longreprtext
        debugger.reset()
        debugger.interaction(None, call.excinfo.tb)
        release()
