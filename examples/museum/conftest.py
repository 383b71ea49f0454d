"""``--museum-table FILE``: write what each check found, and what usual practice sees beside it."""

from museum.table import Table


def pytest_addoption(parser):
    parser.addoption(
        "--museum-table", metavar="FILE", help="write the table of this run, as Markdown"
    )


def pytest_configure(config):
    # Ranks, and workers of xdist, are sessions of their own, and have a part of the tests.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table(config.getoption("museum_table")), "museum_table")
