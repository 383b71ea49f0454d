"""``--museum-table FILE``: write what each check found, and what usual practice sees beside it."""

from museum.table import Table


def pytest_addoption(parser):
    parser.addoption(
        "--museum-table", metavar="FILE", help="write the table of this run, as Markdown"
    )


def pytest_configure(config):
    config.pluginmanager.register(Table(config.getoption("museum_table")), "museum_table")
