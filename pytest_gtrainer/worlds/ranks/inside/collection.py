"""Find the parent's tests in a rank by walking the parent's own chain of directories.

Collecting with ``Session.perform_collect`` a second time drops fixtures of conftest files
(pytest 9.1 and later), so one session walks each directory once, when a test first needs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gtrainer._pytest_private import add_initial_path, collectors_of
from pytest_gtrainer.worlds.ranks.wire import ItemRef


class CollectionDiffers(Exception):
    """The rank does not find a test that the parent has; the message says why."""


class Collection:
    """The tests of a session, collected file by file."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._nodes: dict[Path, pytest.Collector] = {}
        self._items: dict[str, pytest.Item] = {}
        self._files: set[str] = set()
        self._failures: list[str] = []
        session.config.pluginmanager.register(self, "gtrainer-rank-collection")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._failures.append(str(report.longrepr))

    def find(self, ref: ItemRef) -> pytest.Item:
        """The session's own item for one of the parent's.

        Raises:
            CollectionDiffers: the file cannot be collected here, or does not give that test.
        """
        self.load(ref.chain)
        item = self._items.get(ref.nodeid)
        if item is None:
            raise CollectionDiffers(
                f"{ref.nodeid} was collected in the parent but not in this rank: "
                "names and parameters of tests must be the same in every process"
            )
        return item

    def load(self, chain: tuple[str, ...]) -> None:
        """Collect the test file at the end of ``chain``, once."""
        if chain[-1] not in self._files:
            self._collect([Path(part) for part in chain])
            self._files.add(chain[-1])

    def _collect(self, chain: list[Path]) -> None:
        session = self._session
        add_initial_path(session, chain[-1])
        node = self._root(chain[0])
        for path in chain[1:]:
            node = self._child(node, path)
        self._failures.clear()
        items = list(session.genitems(node))
        if self._failures:
            raise CollectionDiffers(f"collecting {chain[-1].name} failed in this rank:\n{self._failures[0]}")
        self._items.update((item.nodeid, item) for item in items)
        session.items = items[:]
        session.config.hook.pytest_collection_modifyitems(
            session=session, config=session.config, items=session.items
        )

    def _root(self, path: Path) -> pytest.Collector:
        if path not in self._nodes:
            found = collectors_of(self._session, path)
            if not found:
                raise CollectionDiffers(f"{path} cannot be collected in this rank")
            self._nodes[path] = found[0]
        return self._nodes[path]

    def _child(self, node: pytest.Collector, path: Path) -> pytest.Collector:
        if path not in self._nodes:
            node.ihook.pytest_collectstart(collector=node)
            report: pytest.CollectReport = node.ihook.pytest_make_collect_report(collector=node)
            if not report.passed:
                raise CollectionDiffers(f"collecting {node.nodeid} failed in this rank:\n{report.longrepr}")
            for child in report.result:
                if isinstance(child, pytest.File | pytest.Directory):
                    self._nodes.setdefault(child.path, child)
        if path not in self._nodes:
            raise CollectionDiffers(f"{path} is not collected in this rank")
        return self._nodes[path]
