"""Set-up shared by all tests of the repository."""

pytest_plugins = ["pytester"]
