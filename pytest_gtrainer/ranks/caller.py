"""``gt_ranks``: call functions on real ranks from a test that itself stays in the parent."""

import pickle
import sys
import traceback
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
    """A function failed, first on ``rank`` (None: on all); ``remote_traceback`` is what its
    interpreter printed.
    """

    def __init__(self, message: str, rank: int | None, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class RankCaller:
    """Runs functions on warm ranks, one call at a time."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        if (plugin := request.config.pluginmanager.getplugin("gtrainer-ranks")) is None:
            pytest.fail(
                "gt_ranks cannot be used inside a rank: the test is there already", pytrace=False
            )
        self._plugin, self._item, self._config = plugin, request.node, request.config

    @facts.check
    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """Call ``function(*args)`` on every rank of a world: the results, in the order of ranks.

        The process group is up on the ranks; ``torch.distributed`` tells a function its rank.
        Inside ``deterministic``, or with ``gt_deterministic``, the ranks are deterministic as well.
        ``size`` is the number of ranks: else the marker's, else all there are.

        Raises:
            RankError: the function raised on a rank, a rank died, or the limit was reached.
            LeaseError: others held the devices for too long.
            TypeError: the function or an argument cannot be sent to another process.
        """
        __tracebackhide__ = True
        spec = spec_of(self._item)
        command = wire.CallFunction(_payload(function, args), chain_of(self._item))
        found = devices.resolve(self._config)
        wanted = size if size is not None else spec.size if spec is not None else found.slots
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
        if any(
            (answer.error or "").rstrip().endswith("Exit: Quitting debugger")
            for answer in answers.values()
        ):
            pytest.exit("Quitting debugger")
        _raise_failure(outcome)
        for rank, answer in answers.items():
            if answer.output:
                print(
                    f"[rank {rank}] {answer.output}",
                    end="" if answer.output.endswith("\n") else "\n",
                )
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
                told = traceback.format_exc()
                raise RankError(f"rank 0 raised {summary_of(error)}\n\n{told}", 0, told) from error


def _payload(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call as bytes: under the settings of this process, if it is inside ``deterministic``."""
    __tracebackhide__ = True
    name = getattr(function, "__qualname__", repr(function))
    if "<lambda>" in name or "<locals>" in name:
        raise TypeError(
            f"gt_ranks.run: {name} has no name that another process could import it by: "
            "define it with def at the top level of the test file, and hand over what it needs as arguments"
        )
    determinism = sys.modules.get("pytest_gtrainer.numerics.determinism")
    if determinism is not None and (settings := determinism.active()) is not None:
        function, args = determinism.call_under, (settings.config, settings.nccl, function, *args)
    try:
        return pickle.dumps((function, args))
    except Exception as error:
        raise TypeError(
            f"gt_ranks.run: {name} or its arguments cannot be sent to another process: {error}"
        ) from error


def _raise_failure(outcome: RanksOutcome) -> None:
    __tracebackhide__ = True
    errors = {
        rank: answer.error for rank, answer in outcome.called.items() if answer.error is not None
    }
    first = min(
        errors,
        key=lambda rank: (outcome.is_consequence(rank), outcome.failed_at(rank)),
        default=None,
    )
    for incident in outcome.causes()[:1]:
        if (
            first is None
            or incident.time < outcome.raised[first].time
            or outcome.is_consequence(first)
        ):
            details = "".join(f"\n\n--- {title} ---\n{text}" for title, text in incident.details)
            raise RankError(incident.text + details, incident.rank)
    if first is not None:
        raise RankError(
            f"rank {first} raised {outcome.raised[first].summary}\n\n{errors[first]}",
            first,
            errors[first],
        )
