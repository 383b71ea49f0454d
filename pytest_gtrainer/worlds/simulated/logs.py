"""The rings of each channel, and the trees, from NCCL's log (``NCCL_DEBUG=INFO``).

A file of rings has the form of the log's lines, one for each channel, and comments after ``#``:

    # two nodes of four
    Channel 00/02 : 0 1 2 3 4 5 6 7
    Channel 01/02 : 0 3 2 5 4 7 6 1

NCCL 2.23.4 and later cut such a line at 127 characters (rings.cc:10-28). The rest is put together
again from lines that every rank writes: ``Ring 00 : 3 -> 0 -> 1`` if ``NCCL_DEBUG_SUBSYS`` has
GRAPH, or the connections, ``Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM``.
"""

import re
from collections.abc import Iterator
from itertools import chain

from pytest_gtrainer.worlds.simulated.rings import Ring, Rings, check_rings
from pytest_gtrainer.worlds.simulated.trees import Tree

_RING = re.compile(
    r"^(?P<who>.*?)Channel (?P<channel>\d+)/(?P<channels>\d+) *:"
    r"(?P<ranks>(?:[ \t]+\d+(?![\d.]))+)(?P<cut>[ \t\d]*\.\.\.)?[ \t]*$"
)
_NEXT = re.compile(r"Ring (?P<channel>\d+) : \d+ -> (?P<rank>\d+) -> (?P<next>\d+)")
# Connection 0 is that of collectives; lines of SHM name none.
_SENDS = re.compile(
    r"Channel (?P<channel>\d+)(?:/0)? : (?P<rank>\d+)\[\w+\] -> (?P<next>\d+)\[\w+\] "
)
_TREES = re.compile(r"Trees((?: \[\d+\] [-\d]+/[-\d]+/[-\d]+->\d+->[-\d]+)+)")
_TREE = re.compile(r"\[(\d+)\] ([-\d]+)/([-\d]+)/([-\d]+)->(\d+)->[-\d]+")


def rings_from_log(text: str) -> Rings:
    """Return the rings of the largest communicator in a log.

    Raises:
        ValueError: something is missing.
    """
    found = list(map(tuple, _communicators(text)))
    if not found:
        raise ValueError(
            "no line like 'Channel 00/08 : 0 7 6 5': log with NCCL_DEBUG=INFO, "
            "and keep the lines of rank 0 whole"
        )
    size = max(len(rings[0]) for rings in found)
    # Communicators with equal rings count as one.
    largest = {rings for rings in found if len(rings[0]) == size}
    if len(largest) > 1:
        raise ValueError(
            f"{len(largest)} communicators of {size} ranks with different rings: "
            "keep the lines of one"
        )
    (rings,) = largest
    check_rings(rings, size)
    return rings


def _communicators(text: str) -> Iterator[list[Ring]]:
    """Yield the rings of each communicator: lines of one process that count channels from 0 up."""
    found: list[tuple[int, dict[int, Ring]]] = []
    latest: dict[tuple[str, int], dict[int, Ring]] = {}
    for line in text.splitlines():
        match = _RING.match(line.split("#")[0])
        if match is None:
            continue
        key, channel = (match["who"], int(match["channels"])), int(match["channel"])
        # The same channel again: the process has made another communicator.
        if key not in latest or channel in latest[key]:
            latest[key] = {}
            found.append((key[1], latest[key]))
        ring = tuple(map(int, match["ranks"].split()))
        latest[key][channel] = _complete_ring(ring, channel, text) if match["cut"] else ring
    for channels, rings in found:
        if rings.keys() != set(range(channels)):
            missing = set(range(channels)) - rings.keys()
            wrong = f"{min(missing)} is missing" if missing else f"{max(rings)} is none of them"
            raise ValueError(f"the log has {len(rings)} of {channels} channels: channel {wrong}")
        yield [rings[channel] for channel in range(channels)]


def _complete_ring(start: Ring, channel: int, text: str) -> Ring:
    """Return the ring of a line that NCCL cut after ``start``, from the lines of other ranks.

    A rank connects its rings before its trees, so the connections above its line "Connected all
    rings" are the ring's. If a tree was connected first, a rank has several connections, and
    nothing is guessed.
    """
    next_ranks = _next_ranks(text, channel, _NEXT) or _next_ranks(text, channel, _SENDS)
    ring, targets = [0], next_ranks.get(0, set())
    while len(targets) == 1 and 0 not in targets and len(ring) <= len(next_ranks):
        ring += targets
        targets = next_ranks.get(ring[-1], set())
    if targets == {0} and tuple(ring[: len(start)]) == start and len(ring) == len(next_ranks):
        return tuple(ring)

    why = f"no other line says where rank {ring[-1]} sends"
    if len(targets) > 1:
        several = ", ".join(map(str, sorted(targets)))
        why = f"of rank {ring[-1]} the log has connections to ranks {several}"
    elif targets == {0}:
        why = "the connections of other lines are not those of this ring"
    begun = " ".join(map(str, start[:4]))
    raise ValueError(
        f"NCCL cut the ring of channel {channel} at 127 characters, as 2.23.4 and later do: "
        f"'Channel ... : {begun} ...'; {why}: log every rank with NCCL_DEBUG_SUBSYS=INIT,GRAPH, "
        'which adds lines like "Ring 00 : 3 -> 0 -> 1"'
    )


def _next_ranks(text: str, channel: int, pattern: re.Pattern[str]) -> dict[int, set[int]]:
    """Return by rank the ranks that it sends to, before its process has connected all rings."""
    found: dict[int, set[int]] = {}
    connected: set[str] = set()
    for line in text.splitlines():
        who = line.partition("NCCL INFO")[0]
        if "Connected all rings" in line:
            connected.add(who)
        match = pattern.search(line)
        if match and int(match["channel"]) == channel and who not in connected:
            found.setdefault(int(match["rank"]), set()).add(int(match["next"]))
    return found


def trees_from_log(text: str) -> tuple[Tree, ...] | None:
    """Return the tree of every channel, None if the log has no trees.

    Every rank writes a line ``Trees [0] 1/-1/-1->0->-1 ...`` (init.cc:1485).

    Raises:
        ValueError: a rank has two trees on a channel, or none.
    """
    by_channel: dict[int, dict[int, tuple[int, ...]]] = {}
    for listed in _TREES.finditer(text):
        for match in _TREE.finditer(listed[1]):
            channel, *children, rank = map(int, match.groups())
            below = tuple(child for child in children if child >= 0)
            if by_channel.setdefault(channel, {}).setdefault(rank, below) != below:
                raise ValueError(
                    f"two trees of channel {channel} for rank {rank}: "
                    "keep the lines of one communicator"
                )
    if not by_channel:
        return None
    # A rank without a line of its own may still be the child of another.
    named = set(chain.from_iterable(by_channel.values()))
    for tree in by_channel.values():
        named.update(*tree.values())
    everyone = range(1 + max(named))
    trees = []
    for channel, tree in sorted(by_channel.items()):
        if missing := set(everyone) - set(tree):
            raise ValueError(
                f"no line 'Trees [{channel}] ...' of rank {min(missing)}: "
                "every rank writes one, so keep the logs of all"
            )
        trees.append(tuple(tree[rank] for rank in everyone))
    return tuple(trees)
