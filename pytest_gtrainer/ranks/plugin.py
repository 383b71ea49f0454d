"""Dispatch of tests to real ranks, from the process that owns the tests; and their world as a test
sees it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from pytest_gtrainer import devices, facts, options
from pytest_gtrainer._pytest_private import tear_down
from pytest_gtrainer.marker import id_of, valid_spec_of

# here, not where they are used first: a pytest run in this process (``pytester``) forgets the
# modules that it imported, and messages are recognised by their classes
from pytest_gtrainer.ranks import wire
from pytest_gtrainer.ranks.inside.session import restored_after
from pytest_gtrainer.ranks.leases import LeaseError
from pytest_gtrainer.ranks.merge import append_section, passes, reports_of
from pytest_gtrainer.ranks.team import RanksError
from pytest_gtrainer.worlds.hygiene import SEED
from pytest_gtrainer.worlds.spec import World, WorldSpec

if TYPE_CHECKING:
    from pytest_gtrainer.ranks.pool import Pool
    from pytest_gtrainer.ranks.torchrun.nodes import Nodes
    from pytest_gtrainer.ranks.watch import RanksOutcome

# Anything else that strikes during dispatch, a plugin's time limit for one, is the test's failure.
NOT_A_FAILURE = (KeyboardInterrupt, pytest.exit.Exception)


def is_rank(config: pytest.Config) -> bool:
    """Return whether this pytest session is itself one rank of a world."""
    return "gt_rank" in getattr(config, "workerinput", {})


def follow(config: pytest.Config) -> int | None:
    """Stand in for pytest's own main loop in a rank of torchrun that follows; None where there is
    nothing to follow.
    """
    launch = devices.launch_of(config)
    if launch is None or launch.leads:
        return None
    if config.option.help or config.option.version:
        return 0
    from pytest_gtrainer.ranks.torchrun.follower import follow_rank_0

    return follow_rank_0(launch, config)


@contextmanager
def ranks_world(spec: WorldSpec, config: pytest.Config) -> Iterator[World]:
    """Enter the world: on a rank's warm default group, or in the parent, without a rank."""
    worker = getattr(config, "workerinput", {})
    if "gt_rank" in worker:
        device, backend, rank = worker["gt_device"], worker["gt_backend"], worker["gt_rank"]
    else:
        found = devices.resolve(config)
        device, backend, rank = found.kind, found.backend, 0 if found.in_process else None
    yield World("ranks", spec.size, rank, spec.nodes, spec.mesh, device, backend)


def ranks_spec(item: pytest.Item) -> WorldSpec | None:
    """The spec of a test that wants to be run by ranks; None for any other, an invalid one
    included.
    """
    spec, stays = valid_spec_of(item), "gt_ranks" in getattr(item, "fixturenames", ())
    return spec if spec is not None and spec.kind == "ranks" and not stays else None


def missing(spec: WorldSpec, found: devices.Devices) -> str | None:
    """Return what ``spec`` needs and the run has not; None if it can run."""
    if spec.kind == "fake":
        on_cuda = found.kind == "cuda"
        return (
            None
            if on_cuda
            else "needs a GPU for the tensors of its fake world, the run has none: not judged"
        )
    if spec.device is not None and spec.device != found.kind:
        return f"needs {spec.device} ranks, the run has {found.kind} ranks: not judged"
    if spec.size > found.slots:
        cause = f"needs {facts.counted(spec.size, 'rank')}, {found.giver} {found.slots}"
        if found.in_process:
            return (
                f"{cause}: debug it on ranks with breakpoint() or --pdb, or let it run on one too, "
                f"by size=[1, {spec.size}]"
            )
        if found.kind == "cpu" and found.giver.startswith("--gt-gpus"):
            return f"{cause}: --gt-gpus={spec.size} lets it run"
        return cause
    return None


@contextmanager
def one_rank(config: pytest.Config) -> Iterator[None]:
    """This process as the one rank of a world, after what hooks do in each rank."""
    from pytest_gtrainer.worlds.fake import world_of_one

    found = devices.resolve(config)
    rank = {"config": config, "rank": 0, "device": found.kind}
    with world_of_one(found.backend):
        config.hook.pytest_gtrainer_rank_setup(**rank)
        try:
            yield
        finally:
            config.hook.pytest_gtrainer_rank_teardown(**rank)


class RanksPlugin:
    """Runs tests marked ``gt_world("ranks")`` on the pool."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._pool: Pool | None = None
        self._nodes: Nodes | None = None
        self._session: pytest.Session | None = None
        self._last_test = ""  # of this process, on ranks or not
        self._alone: ExitStack | None = (
            None  # ends the world of one rank in this process: --gt-one-rank
        )

    @property
    def pool(self) -> Pool:
        if self._pool is None:
            from pytest_gtrainer.ranks.pool import Pool

            self._pool = Pool(self.config, self._nodes)
        return self._pool

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        if (launch := devices.launch_of(self.config)) is not None:
            from pytest_gtrainer.ranks.torchrun.line import Refused
            from pytest_gtrainer.ranks.torchrun.nodes import Nodes
            from pytest_gtrainer.ranks.watch import write_line

            try:
                self._nodes = Nodes(launch, lambda text: write_line(self.config, text))
            except Refused as error:  # there is no key to sign with
                raise pytest.UsageError(str(error)) from error

    def pytest_report_header(self) -> str | None:
        """With workers, which alone collect, the line comes before it is known whether anybody
        needs ranks.
        """
        if self.config.getoption("tx", None) and not hasattr(self.config, "workerinput"):
            return f"gtrainer: {devices.resolve(self.config)}, shared by the workers"
        return None

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[str]:
        return [f"gtrainer: {devices.resolve(self.config)}"] if any(map(ranks_spec, items)) else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip what there are no devices for; such a test is not dispatched, so its setup comes
        here.
        """
        spec = valid_spec_of(item)
        if spec is None or (spec.kind, spec.device) != ("fake", "cuda"):
            spec = ranks_spec(item)
        found = devices.resolve(self.config)
        cause = missing(spec, found) if spec is not None else None
        if spec is None or cause is None:
            if spec is not None and spec.kind == "ranks" and found.in_process:
                self._be_a_rank()
            return
        required = options.get(self.config, "require")
        if required == "cuda" or (required == "ranks" and spec.device in (None, found.kind)):
            pytest.fail(
                f"{cause}, and --gt-require={required} lets no such test be skipped", pytrace=False
            )
        facts.emit("skip", cause=cause)
        raise pytest.skip.Exception(cause, _use_item_location=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._last_test = nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Stand in for pytest's own protocol of a test on ranks: the same hooks, the phases on
        ranks.
        """
        if (spec := self._spec_on_ranks(item)) is None:
            return None
        hooks = item.ihook
        hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        outcomes: list[RanksOutcome] = []
        call = pytest.CallInfo.from_call(
            lambda: outcomes.append(self._run(item, spec, nextitem)), "call", reraise=NOT_A_FAILURE
        )
        reports = (
            reports_of(item, outcomes[0])
            if outcomes
            else [hooks.pytest_runtest_makereport(item=item, call=call)]
        )
        for outcome in outcomes:
            if outcome.has_failed():  # else the parent objects: to a golden, for one
                _explain_examples(item, outcome, reports)
                self._try_on_fresh_ranks(item, spec, reports, outcome)
        for report in reports:
            if report.when != "teardown":
                hooks.pytest_runtest_logreport(report=report)
        if item.session.shouldfail or item.session.shouldstop:
            nextitem = (
                None  # as for pytest: else what a teardown of wider scope raises has no report
            )
        # What earlier tests have set up in this process, and the next one does not share: if that
        # fails, it must be reported before the last report, with which goldens are written.
        call = pytest.CallInfo.from_call(
            lambda: tear_down(item.session, nextitem), "teardown", reraise=NOT_A_FAILURE
        )
        if call.excinfo is not None:
            hooks.pytest_runtest_logreport(
                report=hooks.pytest_runtest_makereport(item=item, call=call)
            )
        for report in reports:
            if report.when == "teardown":
                hooks.pytest_runtest_logreport(report=report)
        hooks.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _try_on_fresh_ranks(
        self,
        item: pytest.Item,
        spec: WorldSpec,
        reports: Sequence[pytest.TestReport],
        before: RanksOutcome,
    ) -> None:
        """Run a failed test once more, on new ranks, and add the result to its failure."""
        failed = next((report for report in reports if report.failed), None)
        if failed is None or options.get(self.config, "fresh-ranks") != "on-failure":
            return
        if not before.on_used_ranks:
            said = "The test was not run again: its ranks were new, no test had run on them."
            append_section(failed, "fresh ranks", said)
            return
        command = wire.RunItem(_item_ref(item), None, item.location)
        try:
            outcome = self.pool.run(
                spec.size, command, limit_of(item.config, spec), item.nodeid, fresh=True
            )
        except (RanksError, LeaseError) as error:
            append_section(failed, "fresh ranks", f"The test was not tried on fresh ranks: {error}")
            return
        said = "The test fails on fresh ranks, too."
        if passes(item, outcome):
            said = (
                "The test passes on fresh ranks. Either something that earlier tests left in these "
                "processes makes it fail, such as a table of a library, or chance does. "
                "--gt-fresh-ranks starts new ranks for each test."
            )
        append_section(failed, "fresh ranks", said)

    def _spec_on_ranks(self, item: pytest.Item) -> WorldSpec | None:
        """Return what a test wants that ranks run; None if it runs here, if only to be skipped."""
        spec = ranks_spec(item)
        if (
            spec is None
            or devices.resolve(self.config).in_process
            or item.get_closest_marker("skip") is not None
        ):
            return None
        if item.config.getoption("setupplan") or item.config.getoption("setuponly"):
            return None  # pytest shows what it would do, and runs no test
        return spec if missing(spec, devices.resolve(self.config)) is None else None

    def _be_a_rank(self) -> None:
        """The next test begins, as on a rank: its world is up before its fixtures, and every test
        has one seed.
        """
        import torch.distributed as dist

        from pytest_gtrainer.numerics.determinism import seed_everything

        if self._alone is not None and not dist.is_initialized():  # the test before has ended it
            self._be_none()
        if self._alone is None:
            self._alone = ExitStack()
            self._alone.enter_context(one_rank(self.config))
        seed_everything(SEED)

    def _be_none(self) -> None:
        stack, self._alone = self._alone, None
        if stack is not None:
            stack.close()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self._refuse_late_marker(item)
        result = (yield) if self._alone is None else (yield from restored_after(item))
        self._refuse_late_marker(item)  # the test itself may have added it
        return result

    def _refuse_late_marker(self, item: pytest.Item) -> None:
        """Fail a test that got its marker after it could be sent to ranks, and so runs here."""
        if ranks_spec(item) is not None and not devices.resolve(self.config).in_process:
            pytest.fail(
                'gt_world("ranks") was added while the test was running, so no rank ran it: add '
                "the marker in the test file, or in pytest_collection_modifyitems",
                pytrace=False,
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            if nextitem is None or ranks_spec(nextitem) is None:
                self._be_none()

    def _run(
        self, item: pytest.Item, spec: WorldSpec, nextitem: pytest.Item | None
    ) -> RanksOutcome:
        following = self._next_on_ranks(item, spec, nextitem)
        next_item = _item_ref(following) if following is not None else None
        command = wire.RunItem(_item_ref(item), next_item, item.location)
        try:
            outcome = self.pool.run(spec.size, command, limit_of(item.config, spec), item.nodeid)
            if any(
                "Quitting debugger" in (answer.trouble or "") for answer in outcome.done.values()
            ):
                item.session.shouldstop = "Quitting debugger"
            return outcome
        except (RanksError, LeaseError) as error:
            why = str(error)
        pytest.fail(
            why, pytrace=False
        )  # here, so that pytest does not show the other exception above it

    def _next_on_ranks(
        self, item: pytest.Item, spec: WorldSpec, nextitem: pytest.Item | None
    ) -> pytest.Item | None:
        """The next test on as many ranks: what it shares stays set up. Under xdist only the very
        next one is known.
        """
        items = item.session.items
        if hasattr(self.config, "workerinput"):
            items = [item, nextitem] if nextitem is not None else []
        later = islice(items, items.index(item) + 1, None) if item in items else ()
        specs = ((other, self._spec_on_ranks(other)) for other in later)
        return next(
            (other for other, found in specs if found is not None and found.size == spec.size), None
        )

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """End the ranks before other plugins sum up: coverage of a rank is written when it ends."""
        try:
            return (yield)
        finally:
            for nodeid, problem in self._close():
                # The test has ended. One more report of it is what all who count failures heed: the
                # exit status, the summary, the JUnit file, the page and --lf.
                if hasattr(self.config, "workerinput") and self._last_test != nodeid:
                    # xdist takes reports of the last test of a worker only
                    nodeid, problem = self._last_test, f"after {nodeid}, {problem}"
                path, _, name = nodeid.partition("::")
                late = pytest.TestReport(
                    nodeid, (path, None, name), {}, "failed", problem, "teardown"
                )
                self.config.hook.pytest_runtest_logreport(report=late)

    def pytest_unconfigure(self) -> None:
        self._close()
        # only now: torchrun ends everybody when one exits with an error
        if self._nodes is not None and self._session is not None:
            self._nodes.end(int(self._session.exitstatus))

    def _close(self) -> list[tuple[str, str]]:
        """End all ranks. Returns what went wrong in that, each with the last test that the rank
        ran.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            return []
        pool.close()
        return pool.problems


def _explain_examples(
    item: pytest.Item, outcome: RanksOutcome, reports: Sequence[pytest.TestReport]
) -> None:
    """Add to a failed test of hypothesis that its ranks may have run different examples, if only
    some failed.
    """
    failed = next((report for report in reports if report.failed and report.when == "call"), None)
    if failed is None or not hasattr(getattr(item, "obj", None), "hypothesis"):
        return
    own_failures = [rank for rank in outcome.raised if not outcome.is_consequence(rank)]
    if not outcome.incidents and len(own_failures) == outcome.size:
        return
    append_section(
        failed,
        "hypothesis",
        "Ranks run the same examples until one fails. A rank that fails alone then runs smaller "
        "examples alone, so its collectives no longer match those of other ranks. Let all ranks "
        "fail together: gather what the test asserts from all ranks, then assert it on each.",
    )


def limit_of(config: pytest.Config, spec: WorldSpec | None) -> float:
    """The limit of a test in seconds: the marker's, else ``--gt-timeout``."""
    return float((spec and spec.timeout) or options.get(config, "timeout"))


def chain_of(item: pytest.Item) -> tuple[str, ...]:
    """The directories and the file that lead to a test, outermost first."""
    return tuple(
        str(node.path)
        for node in item.listchain()
        if isinstance(node, pytest.Directory | pytest.File)
    )


def _item_ref(item: pytest.Item) -> wire.ItemRef:
    return wire.ItemRef(id_of(item), chain_of(item))
