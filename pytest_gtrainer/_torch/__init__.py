"""The private names of torch: a module for each topic, and nowhere else in this package.

Comments say why a name is needed, at the line that uses it. ``python -m pytest_gtrainer doctor``
reads the names in the source, and looks for them in the torch that is installed: imports, and the
table ``ATTRIBUTES``, which has attributes by class, or by the module or function that sets them.

An import inside ``try`` is optional: a name that some versions have. Importing this package imports
neither torch nor a topic.
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
