"""Dispatch of tests to real ranks, from the process that owns the tests."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_gtrainer import devices, facts, options
from pytest_gtrainer import launch as launches
from pytest_gtrainer.marker import spec_of

# here, not where it is used first: a pytest run in this process (``pytester``) forgets the modules that it imported,
# and messages are told by their classes
from pytest_gtrainer.worlds.ranks import wire  # noqa: F401
from pytest_gtrainer.worlds.ranks.schedule import following
from pytest_gtrainer.worlds.spec import SpecError, WorldSpec

if TYPE_CHECKING:
    from pytest_gtrainer.worlds.ranks.pool import Launcher


def is_rank(config: pytest.Config) -> bool:
    """Whether this pytest session is itself one rank of a world."""
    return "gt_rank" in getattr(config, "workerinput", {})


def ranks_spec(item: pytest.Item) -> WorldSpec | None:
    """The spec of a test that wants to be run by ranks; None for any other, an invalid one included."""
    try:
        spec = spec_of(item)
    except SpecError:
        return None
    if spec is None or spec.kind != "ranks" or "gt_ranks" in getattr(item, "fixturenames", ()):
        return None
    return spec


def _spec_with_devices(item: pytest.Item) -> WorldSpec | None:
    """The spec of a test that needs what the run may not have: ranks, or a GPU for a fake world's tensors."""
    try:
        spec = spec_of(item)
    except SpecError:
        return None
    return spec if spec is not None and spec.kind == "fake" and spec.device == "cuda" else ranks_spec(item)


def missing(spec: WorldSpec, found: devices.Devices) -> str | None:
    """What ``spec`` needs and the run has not; None if it can run.

    >>> from pytest_gtrainer.worlds.spec import make_spec
    >>> missing(make_spec("ranks", size=16), devices.Devices("cpu", 8))
    'needs 16 ranks, --gt-gpus gives 8'
    >>> missing(make_spec("ranks", size=2, device="cuda"), devices.Devices("cpu", 8))
    'needs cuda ranks, the run has cpu ranks: not judged'
    >>> missing(make_spec("fake", size=512, device="cuda"), devices.Devices("cpu", 8))
    'needs a GPU for the tensors of its fake world, the run has none: not judged'
    """
    if spec.kind == "fake":
        on_cuda = found.kind == "cuda"
        return None if on_cuda else "needs a GPU for the tensors of its fake world, the run has none: not judged"
    if spec.device is not None and spec.device != found.kind:
        return f"needs {spec.device} ranks, the run has {found.kind} ranks: not judged"
    if spec.size > found.slots:
        return f"needs {spec.size} ranks, {found.giver} {found.slots}"
    return None


def is_required(spec: WorldSpec, found: devices.Devices, required: str | None) -> bool:
    """Whether ``--gt-require`` makes it a failure that ``spec`` cannot run.

    >>> from pytest_gtrainer.worlds.spec import make_spec
    >>> small, cuda = make_spec("ranks", size=16), make_spec("ranks", size=2, device="cuda")
    >>> [is_required(spec, devices.Devices("cpu", 8), "ranks") for spec in (small, cuda)]
    [True, False]
    """
    return required == "cuda" or (required == "ranks" and spec.device in (None, found.kind))


class RanksPlugin:
    """Runs tests marked ``gt_world("ranks")`` on the pool."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._pool: Launcher | None = None
        self._launch = launches.of(config)
        self._session: pytest.Session | None = None
        self._following: Mapping[pytest.Item, pytest.Item] | None = None

    @property
    def pool(self) -> Launcher:
        """Who has the ranks of this pytest process."""
        if self._pool is None:
            self._pool = self._own_ranks() if self._launch is None else self._ranks_of(self._launch)
        return self._pool

    def _own_ranks(self) -> Launcher:
        from pytest_gtrainer.worlds.ranks.pool import Pool

        return Pool(self.config)

    def _ranks_of(self, launch: launches.Launch) -> Launcher:
        from pytest_gtrainer.worlds.torchrun.pool import TorchrunPool

        return TorchrunPool(self.config, launch)

    # --- before ---------------------------------------------------------------------------

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_report_header(self) -> str | None:
        """With workers, which alone collect, the line comes before it is known whether anybody needs ranks."""
        if self.config.getoption("tx", None) and not hasattr(self.config, "workerinput"):
            return f"gtrainer: {devices.resolve(self.config)}, shared by the workers"
        return None

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[str]:
        if not any(ranks_spec(item) for item in items):
            return []
        lines = [f"gtrainer: {devices.resolve(self.config)}"]
        if self.config.getoption("usepdb") or self.config.getoption("trace"):
            lines.append("gtrainer: --pdb and --trace do not reach into ranks")
        return lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip what there are no devices for; such a test is not dispatched, so its setup comes here."""
        spec = _spec_with_devices(item)
        found = devices.resolve(self.config)
        cause = missing(spec, found) if spec is not None else None
        if spec is None or cause is None:
            return
        required = options.get(self.config, "require")
        if is_required(spec, found, required):
            pytest.fail(f"{cause}, and --gt-require={required} lets no such test be skipped", pytrace=False)
        facts.emit("skip", cause=cause)
        raise pytest.skip.Exception(cause, _use_item_location=True)

    # --- running ---------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        spec = self._spec_on_ranks(item)
        if spec is None:
            if self._pool is not None:
                self._pool.leave()
            return None
        from pytest_gtrainer.worlds.ranks.dispatch import dispatch

        dispatch(self.pool, item, spec, self._next_on_ranks(item, spec, nextitem), nextitem)
        return True

    def _size_on_ranks(self, item: pytest.Item) -> int | None:
        spec = self._spec_on_ranks(item)
        return spec.size if spec is not None else None

    def _spec_on_ranks(self, item: pytest.Item) -> WorldSpec | None:
        """What a test wants that ranks run; None if it runs here, if only to be skipped."""
        spec = ranks_spec(item)
        if spec is None or item.get_closest_marker("skip") is not None:
            return None
        if item.config.getoption("setupplan") or item.config.getoption("setuponly"):
            return None  # pytest shows what it would do, and runs no test
        return spec if missing(spec, devices.resolve(self.config)) is None else None

    def _next_on_ranks(
        self, item: pytest.Item, spec: WorldSpec, nextitem: pytest.Item | None
    ) -> pytest.Item | None:
        """The next test on the same ranks; under xdist only the very next test is known."""
        if hasattr(self.config, "workerinput"):
            same = nextitem is not None and self._size_on_ranks(nextitem) == spec.size
            return nextitem if same else None
        if self._following is None:
            self._following = following(item.session.items, self._size_on_ranks)
        return self._following.get(item)

    # --- after -----------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """End the ranks before other plugins sum up: coverage of a rank is written when it ends."""
        try:
            return (yield)
        finally:
            if self._launch is None:
                self._close()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._launch is None:
            self._close()

    def pytest_unconfigure(self) -> None:
        """Under torchrun the others exit only now: torchrun ends everybody when one exits with an error."""
        if self._launch is not None and self._session is not None:
            self.pool.close(int(self._session.exitstatus))
            self._pool = None
        self._close()

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
