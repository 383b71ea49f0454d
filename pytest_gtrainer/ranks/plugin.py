"""The plugin that sends tests to real ranks; and the world of ranks as a test sees it."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from pytest_gtrainer import devices, facts, options
from pytest_gtrainer._pytest_private import tear_down
from pytest_gtrainer.marker import id_of, valid_spec_of

# The rest is imported where a test on ranks needs it: this module is part of every pytest run.
if TYPE_CHECKING:
    from pytest_gtrainer.ranks import wire
    from pytest_gtrainer.ranks.pool import Pool
    from pytest_gtrainer.ranks.torchrun.nodes import Nodes
    from pytest_gtrainer.ranks.watch import RanksOutcome
    from pytest_gtrainer.worlds.spec import World, WorldSpec

# Any other exception while ranks run a test, such as a plugin's time limit, fails this test.
NOT_A_FAILURE = (KeyboardInterrupt, pytest.exit.Exception)


def is_rank(config: pytest.Config) -> bool:
    """Return whether this pytest session is itself one rank of a world."""
    return "gt_rank" in getattr(config, "workerinput", {})


def follow(config: pytest.Config) -> int | None:
    """Run a process of torchrun that follows rank 0, in place of pytest's main loop.

    Returns:
        The exit status; None if this process does not follow another one.
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
    from pytest_gtrainer.worlds.spec import World

    worker = getattr(config, "workerinput", {})
    rank: int | None
    if "gt_rank" in worker:
        device, backend, rank = worker["gt_device"], worker["gt_backend"], worker["gt_rank"]
    else:
        found = devices.resolve(config)
        device, backend = found.kind, found.backend
        rank = 0 if found.in_process else None
    yield World("ranks", spec.size, rank, spec.nodes, spec.mesh, device, backend)


def ranks_spec(item: pytest.Item) -> WorldSpec | None:
    """Return the spec of a test that ranks run; None for other tests and for an invalid spec."""
    # A test that calls functions on ranks stays in the parent itself.
    if "gt_ranks" in getattr(item, "fixturenames", ()):
        return None
    spec = valid_spec_of(item)
    if spec is None or spec.kind != "ranks":
        return None
    return spec


def missing(spec: WorldSpec, found: devices.Devices) -> str | None:
    """Return what ``spec`` needs and the run does not have; None if it can run."""
    if spec.kind == "fake":
        if found.kind == "cuda":
            return None
        return "needs a GPU for the tensors of its fake world, the run has none: not judged"
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
    """Make this process the one rank of a world inside, and run the hooks of a rank."""
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
        # With --gt-one-rank: ends the world of one rank in this process.
        self._own_world: ExitStack | None = None

    @property
    def pool(self) -> Pool:
        if self._pool is None:
            from pytest_gtrainer.ranks.pool import Pool

            self._pool = Pool(self.config, self._nodes)
        return self._pool

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        launch = devices.launch_of(self.config)
        if launch is not None:
            from pytest_gtrainer.ranks.torchrun.line import Refused
            from pytest_gtrainer.ranks.torchrun.nodes import Nodes
            from pytest_gtrainer.ranks.watch import write_line

            try:
                self._nodes = Nodes(launch, lambda text: write_line(self.config, text))
            except Refused as error:  # there is no key to sign with
                raise pytest.UsageError(str(error)) from error

    def pytest_report_header(self) -> str | None:
        """Name the devices, if workers share them.

        Only workers collect, so the run does not know yet whether any test needs ranks.
        """
        if self.config.getoption("tx", None) and not hasattr(self.config, "workerinput"):
            return f"gtrainer: {devices.resolve(self.config)}, shared by the workers"
        return None

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[str]:
        if not any(map(ranks_spec, items)):
            return []
        return [f"gtrainer: {devices.resolve(self.config)}"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test that there are no devices for.

        Such a test is not sent to ranks, so its setup runs here.
        """
        spec = valid_spec_of(item)
        if spec is None or (spec.kind, spec.device) != ("fake", "cuda"):
            spec = ranks_spec(item)
        if spec is None:
            return
        found = devices.resolve(self.config)
        cause = missing(spec, found)
        if cause is None:
            if spec.kind == "ranks" and found.in_process:
                self._enter_own_world()
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
        """Run a test on ranks, in place of pytest's own protocol.

        The same hooks are called here; setup, call and teardown run on the ranks.
        """
        spec = self._spec_on_ranks(item)
        if spec is None:
            return None
        from pytest_gtrainer.ranks.merge import reports_of

        hooks = item.ihook
        hooks.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        outcomes: list[RanksOutcome] = []
        call = pytest.CallInfo.from_call(
            lambda: outcomes.append(self._run(item, spec, nextitem)), "call", reraise=NOT_A_FAILURE
        )
        if outcomes:
            reports = reports_of(item, outcomes[0])
        else:
            reports = [hooks.pytest_runtest_makereport(item=item, call=call)]
        # If no rank failed, a report may still fail: by a golden, which the parent compares.
        if outcomes and outcomes[0].has_failed():
            _explain_examples(item, outcomes[0], reports)
            self._try_on_fresh_ranks(item, spec, reports, outcomes[0])
        for report in reports:
            if report.when != "teardown":
                hooks.pytest_runtest_logreport(report=report)
        if item.session.shouldfail or item.session.shouldstop:
            # As pytest does: else an error in the teardown of a wider scope would have no report.
            nextitem = None
        # Tear down what earlier tests have set up in this process and the next one does not share.
        # If that fails, it must be reported before the last report, with which goldens are written.
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
        from pytest_gtrainer.ranks import wire
        from pytest_gtrainer.ranks.leases import LeaseError
        from pytest_gtrainer.ranks.merge import append_section, passes
        from pytest_gtrainer.ranks.team import RanksError

        if not before.on_used_ranks:
            text = "The test was not run again: its ranks were new, no test had run on them."
            append_section(failed, "fresh ranks", text)
            return
        command = wire.RunItem(_item_ref(item), None, item.location)
        try:
            outcome = self.pool.run(
                spec.size, command, limit_of(item.config, spec), item.nodeid, fresh=True
            )
        except (RanksError, LeaseError) as error:
            append_section(failed, "fresh ranks", f"The test was not tried on fresh ranks: {error}")
            return
        text = "The test fails on fresh ranks, too."
        if passes(item, outcome):
            text = (
                "The test passes on fresh ranks. Either something that earlier tests left in these "
                "processes makes it fail, such as a table of a library, or chance does. "
                "--gt-fresh-ranks starts new ranks for each test."
            )
        append_section(failed, "fresh ranks", text)

    def _spec_on_ranks(self, item: pytest.Item) -> WorldSpec | None:
        """Return the spec of a test that is sent to ranks.

        None if it runs in this process, even if only to be skipped.
        """
        spec = ranks_spec(item)
        if spec is None or item.get_closest_marker("skip") is not None:
            return None
        found = devices.resolve(self.config)
        if found.in_process or missing(spec, found) is not None:
            return None
        if item.config.getoption("setupplan") or item.config.getoption("setuponly"):
            return None  # pytest shows what it would do, and runs no test
        return spec

    def _enter_own_world(self) -> None:
        """Begin a test as a rank does: the world is up before its fixtures, and the seed is set."""
        import torch.distributed as dist

        from pytest_gtrainer.numerics.determinism import seed_everything
        from pytest_gtrainer.worlds.hygiene import SEED

        # The test before may have destroyed the group.
        if self._own_world is not None and not dist.is_initialized():
            self._leave_own_world()
        if self._own_world is None:
            self._own_world = ExitStack()
            self._own_world.enter_context(one_rank(self.config))
        seed_everything(SEED)

    def _leave_own_world(self) -> None:
        stack, self._own_world = self._own_world, None
        if stack is not None:
            stack.close()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self._refuse_late_marker(item)
        if self._own_world is None:
            result = yield
        else:
            from pytest_gtrainer.ranks.inside.session import restored_after

            result = yield from restored_after(item)
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
                self._leave_own_world()

    def _run(
        self, item: pytest.Item, spec: WorldSpec, nextitem: pytest.Item | None
    ) -> RanksOutcome:
        from pytest_gtrainer.ranks import wire
        from pytest_gtrainer.ranks.leases import LeaseError
        from pytest_gtrainer.ranks.team import RanksError
        from pytest_gtrainer.report.repeats import IS_OBSERVED

        following = self._next_on_ranks(item, spec, nextitem)
        next_item = None
        if following is not None:
            next_item = _item_ref(following)
        is_observed = item.config.stash.get(IS_OBSERVED, False)
        command = wire.RunItem(_item_ref(item), next_item, item.location, is_observed)
        try:
            outcome = self.pool.run(spec.size, command, limit_of(item.config, spec), item.nodeid)
        except (RanksError, LeaseError) as error:
            # ``from None``, or pytest would show the other exception above this one.
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        for answer in outcome.done.values():
            if "Quitting debugger" in (answer.trouble or ""):
                item.session.shouldstop = "Quitting debugger"
        return outcome

    def _next_on_ranks(
        self, item: pytest.Item, spec: WorldSpec, nextitem: pytest.Item | None
    ) -> pytest.Item | None:
        """Return the next test on as many ranks, with which fixtures are shared.

        Under xdist only the very next test is known.
        """
        if nextitem is not None and nextitem.nodeid == item.nodeid:
            return nextitem  # the test comes again, by --gt-repeat
        later: Iterable[pytest.Item] = ()
        if hasattr(self.config, "workerinput"):
            if nextitem is not None:
                later = [nextitem]
        elif item in item.session.items:
            items = item.session.items
            later = islice(items, items.index(item) + 1, None)
        for other in later:
            found = self._spec_on_ranks(other)
            if found is not None and found.size == spec.size:
                return other
        return None

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """End the ranks before other plugins sum up: coverage of a rank is written when it ends."""
        try:
            return (yield)
        finally:
            for nodeid, problem in self._close():
                # The test has ended. One more report of it reaches all that count failures: the
                # exit status, the summary, the JUnit file, the page and --lf.
                if hasattr(self.config, "workerinput") and self._last_test != nodeid:
                    # xdist takes reports of the last test of a worker only.
                    nodeid, problem = self._last_test, f"after {nodeid}, {problem}"
                path, _, name = nodeid.partition("::")
                late = pytest.TestReport(
                    nodeid, (path, None, name), {}, "failed", problem, "teardown"
                )
                self.config.hook.pytest_runtest_logreport(report=late)

    def pytest_unconfigure(self) -> None:
        self._close()
        # Only now: torchrun ends everybody when one exits with an error.
        if self._nodes is not None and self._session is not None:
            self._nodes.end(int(self._session.exitstatus))

    def _close(self) -> list[tuple[str, str]]:
        """End all ranks; return what went wrong in that, with the last test that the ranks ran."""
        pool, self._pool = self._pool, None
        if pool is None:
            return []
        pool.close()
        return pool.problems


def _explain_examples(
    item: pytest.Item, outcome: RanksOutcome, reports: Sequence[pytest.TestReport]
) -> None:
    """Add to a failure of hypothesis on some ranks that they may have run different examples."""
    failed = next((report for report in reports if report.failed and report.when == "call"), None)
    if failed is None or not hasattr(getattr(item, "obj", None), "hypothesis"):
        return
    own_failures = [rank for rank in outcome.raised if not outcome.is_consequence(rank)]
    if not outcome.incidents and len(own_failures) == outcome.size:
        return
    from pytest_gtrainer.ranks.merge import append_section

    append_section(
        failed,
        "hypothesis",
        "Ranks run the same examples until one fails. A rank that fails alone then runs smaller "
        "examples alone, so its collectives no longer match those of other ranks. Let all ranks "
        "fail together: gather what the test asserts from all ranks, then assert it on each.",
    )


def limit_of(config: pytest.Config, spec: WorldSpec | None) -> float:
    """Return the limit of a test in seconds: the marker's, else ``--gt-timeout``."""
    if spec is not None and spec.timeout:
        return float(spec.timeout)
    return float(options.get(config, "timeout"))


def chain_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the directories and the file that lead to a test, outermost first."""
    chain = []
    for node in item.listchain():
        if isinstance(node, pytest.Directory | pytest.File):
            chain.append(str(node.path))
    return tuple(chain)


def _item_ref(item: pytest.Item) -> wire.ItemRef:
    from pytest_gtrainer.ranks import wire

    return wire.ItemRef(id_of(item), chain_of(item))
