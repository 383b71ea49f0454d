"""``gt_ranks``: call functions on real ranks from a test that itself stays in the parent."""

import contextlib
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from pytest_gtrainer import devices, facts
from pytest_gtrainer.marker import spec_of
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.inside.session import summary_of
from pytest_gtrainer.ranks.objections import controls_that_never_differ
from pytest_gtrainer.ranks.plugin import chain_of, limit_of, missing, one_rank
from pytest_gtrainer.ranks.watch import RanksOutcome
from pytest_gtrainer.report.collected import merge_facts, select_shown
from pytest_gtrainer.worlds import hygiene
from pytest_gtrainer.worlds.spec import make_spec


class RankError(Exception):
    """A function failed on ranks.

    Attributes:
        rank: where it failed first; None if it concerns all ranks.
        remote_traceback: the text that the interpreter of that rank printed.
    """

    def __init__(self, message: str, rank: int | None, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class RankCaller:
    """Runs functions on warm ranks, one call at a time."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._plugin = request.config.pluginmanager.getplugin("gtrainer-ranks")
        if self._plugin is None:
            pytest.fail(
                "gt_ranks cannot be used inside a rank: the test is there already", pytrace=False
            )
        self._item, self._config = request.node, request.config

    @facts.check
    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """Call ``function(*args)`` on every rank of a world.

        The process group is up on the ranks; a function asks ``torch.distributed`` for its rank.
        Inside ``deterministic``, or with ``gt_deterministic``, the ranks are deterministic as well.

        Args:
            function: one at the top level of a module, so that a rank can import it.
            args: they are pickled.
            size: the number of ranks; by default the marker's, else all there are.

        Returns:
            The results, in the order of ranks.

        Raises:
            RankError: the function raised on a rank, a rank died, or the limit was reached.
            LeaseError: others held the devices for too long.
            TypeError: the function or an argument cannot be sent to another process.
        """
        __tracebackhide__ = True
        spec = spec_of(self._item)
        command = wire.CallFunction(_payload(function, args), chain_of(self._item))
        found = devices.resolve(self._config)
        wanted = found.slots if spec is None else spec.size
        if size is not None:
            wanted = size
        if type(wanted) is not int or wanted < 1:
            raise ValueError(f"gt_ranks.run: size is a whole number, 1 or more; not {wanted!r}")
        if wanted > found.slots:
            cause = str(missing(make_spec("ranks", size=wanted), found))
            facts.emit("skip", cause=cause)
            pytest.skip(cause)
        if found.in_process:
            return [self._call_here(function, args)]
        outcome = self._plugin.pool.run(
            wanted, command, limit_of(self._config, spec), self._item.nodeid
        )
        answers = outcome.called
        sent = {rank: answer.facts for rank, answer in answers.items()}
        for fact in merge_facts(sent):
            facts.emit(**fact)
        for fact in select_shown(sent.get(0, ())):
            facts.emit(**fact)
        for answer in answers.values():
            if (answer.error or "").rstrip().endswith("Exit: Quitting debugger"):
                pytest.exit("Quitting debugger")
        _end(outcome)
        for rank, answer in answers.items():
            if answer.output:
                end = "" if answer.output.endswith("\n") else "\n"
                print(f"[rank {rank}] {answer.output}", end=end)
        for text in controls_that_never_differ(sent):
            raise RankError(text, None)
        return [pickle.loads(answer.result or b"") for answer in answers.values()]

    def _call_here(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        from pytest_gtrainer.numerics.determinism import seed_everything

        with one_rank(self._config), hygiene.restored():
            seed_everything(hygiene.SEED)
            try:
                return function(*args)
            except Exception as error:
                text = traceback.format_exc()
                raise RankError(f"rank 0 raised {summary_of(error)}\n\n{text}", 0, text) from error


def _payload(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the call as bytes.

    Inside ``deterministic`` the ranks get the settings of this process.
    """
    __tracebackhide__ = True
    name = getattr(function, "__qualname__", repr(function))
    if "<lambda>" in name or "<locals>" in name:
        raise TypeError(
            f"gt_ranks.run: {name} has no name that another process could import it by: "
            "define it with def at the top level of the test file, and hand over what it needs as "
            "arguments"
        )
    # Not imported here, since it imports torch; a test that is inside has imported it.
    determinism = sys.modules.get("pytest_gtrainer.numerics.determinism")
    settings = determinism.active() if determinism is not None else None
    if determinism is not None and settings is not None:
        function, args = determinism.call_under, (settings.config, settings.nccl, function, *args)
    try:
        return pickle.dumps((function, args))
    except Exception as error:
        raise TypeError(
            f"gt_ranks.run: {name} or its arguments cannot be sent to another process: {error}"
        ) from error


def _end(outcome: RanksOutcome) -> None:
    """Raise the earliest cause of a failure, and issue the ranks' warnings."""
    __tracebackhide__ = True
    try:
        _raise_failure(outcome)
    except RankError:
        # A filter that raises a warning as an error must not hide the failure.
        with contextlib.suppress(Warning):
            _repeat_warnings(outcome)
        raise
    _repeat_warnings(outcome)


def _repeat_warnings(outcome: RanksOutcome) -> None:
    """Issue the ranks' warnings here, under the filters of the test; equal ones once."""
    records: dict[wire.WarningRecord, None] = {}
    for answer in outcome.called.values():
        records |= dict.fromkeys(answer.warnings)
    for record in records:
        warnings.warn_explicit(record.text, record.class_here(), record.filename, record.lineno)


def _raise_failure(outcome: RanksOutcome) -> None:
    """Raise the earliest cause of a failure: an incident, or the exception of a rank."""
    __tracebackhide__ = True
    failed = [rank for rank, answer in outcome.called.items() if answer.error is not None]
    # An exception that only says that another rank has gone comes last.
    failed.sort(key=lambda rank: (outcome.is_consequence(rank), outcome.failed_at(rank)))
    first = failed[0] if failed else None
    incident = next(iter(outcome.causes()), None)
    if incident is not None:
        is_earlier = first is None or incident.time < outcome.raised[first].time
        if first is None or is_earlier or outcome.is_consequence(first):
            details = [f"\n\n--- {title} ---\n{text}" for title, text in incident.details]
            raise RankError("".join([incident.text, *details]), incident.rank)
    if first is not None:
        error = str(outcome.called[first].error)
        summary = outcome.raised[first].summary
        raise RankError(f"rank {first} raised {summary}\n\n{error}", first, error)
