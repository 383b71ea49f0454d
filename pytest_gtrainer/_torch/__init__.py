"""The private names of torch: a module a topic, and nowhere else in this package.

Each module says what it relies on and why. Its imports, the names that it spells out
(``c10d._world``) and the calls that it makes are the list of what it needs: ``python -m
pytest_gtrainer doctor`` reads them in the source and looks for them in the torch that is installed.
What the source does not tell stands in tables beside the imports:

- ``ATTRIBUTES``: whose attributes are used, by class (or by the module or function that sets them);
- ``CALLED_ON_US``: which methods of a class of ours torch calls, by the function of torch that
  does.

An import inside ``try`` with an ``except ImportError`` that does not raise is optional: a name that
some versions have. Importing this package imports neither torch nor a topic.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata


@contextmanager
def private_names() -> Iterator[None]:
    """Around a topic's imports: a name that this torch lacks is an ImportError that says what to
    do.
    """
    try:
        yield
    except ImportError as error:
        if error.name == "torch":  # there is none
            raise
        raise ImportError(
            f"torch {metadata.version('torch')} lacks what pytest-gtrainer relies on: {error}; "
            "what still works: python -m pytest_gtrainer doctor",
            name=error.name,
        ) from error
