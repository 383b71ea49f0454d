r"""Read a traced graph: its nodes, its collectives, and the layout of its payloads.

Begin with ``nodes``, then ``collectives``, ``bucket_plan`` and ``layout``. Here are paths of names,
``layers.0.wq``, without torch. A name that holds a dot itself, as a key of a dictionary may, keeps
it after a backslash: ``d["a.b"]`` is ``d.a\.b``.
"""

import re
from collections.abc import Iterable

_PART = re.compile(r"(?:^|\.)((?:\\[.\\]|[^.])*)")


def join_path(names: Iterable[str]) -> str:
    r"""Return the path of names.

    >>> print(join_path(["d", "a.b"]), join_path(["d", "a", "b"]))
    d.a\.b d.a.b
    >>> print(join_path(["a\\b"]), join_path(["a\\", "b"]))
    a\b a\\.b
    """
    return re.sub(r"\\(?=[.\\\0])|\.", r"\\\g<0>", "\0".join(names)).replace("\0", ".")


def split_path(path: str) -> list[str]:
    """Return the parts of a path, each as it stands there; ``name_of`` gives its name."""
    return _PART.findall(path) if "\\" in path else path.split(".")


def name_of(part: str) -> str:
    r"""Return the name that a part stands for.

    >>> [name_of(part) for part in split_path(r"d.a\.b")]
    ['d', 'a.b']
    """
    return re.sub(r"\\([.\\])", r"\1", part)
