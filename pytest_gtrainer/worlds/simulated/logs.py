"""What NCCL's log (``NCCL_DEBUG=INFO``) tells of a net: the rings of each channel, and the trees.

A file of rings has the form of the log's lines, one for each channel, and comments behind ``#``:

    # two nodes of four
    Channel 00/02 : 0 1 2 3 4 5 6 7
    Channel 01/02 : 0 3 2 5 4 7 6 1

NCCL 2.23.4 and later cut such a line at 127 characters (rings.cc:10-28). What is cut is put together again from lines
that every rank writes: ``Ring 00 : 3 -> 0 -> 1`` if ``NCCL_DEBUG_SUBSYS`` has GRAPH, or ``Channel 00/0 : 0[0] -> 1[1]
via P2P/CUMEM``, which tells of connections.
"""

import re
from collections.abc import Iterator

from pytest_gtrainer.worlds.simulated.rings import Ring, Rings, check_rings
from pytest_gtrainer.worlds.simulated.trees import Tree

_RING = re.compile(
    r"^(?P<who>.*?)Channel (?P<channel>\d+)/(?P<channels>\d+) *:"
    r"(?P<ranks>(?:[ \t]+\d+(?![\d.]))+)(?P<cut>[ \t\d]*\.\.\.)?[ \t]*$"
)
_NEXT = re.compile(r"Ring (?P<channel>\d+) : \d+ -> (?P<rank>\d+) -> (?P<next>\d+)")
# connection 0 is that of collectives; SHM's lines name none
_SENDS = re.compile(
    r"Channel (?P<channel>\d+)(?:/0)? : (?P<rank>\d+)\[\w+\] -> (?P<next>\d+)\[\w+\] "
)
_TREES = re.compile(r"Trees((?: \[\d+\] [-\d]+/[-\d]+/[-\d]+->\d+->[-\d]+)+)")
_TREE = re.compile(r"\[(\d+)\] ([-\d]+)/([-\d]+)/([-\d]+)->(\d+)->[-\d]+")


def rings_from_log(text: str) -> Rings:
    """The rings of the largest communicator in a log of ``NCCL_DEBUG=INFO``; a ValueError says what is missing."""
    if not (found := list(_communicators(text))):
        raise ValueError(
            "no line like 'Channel 00/08 : 0 7 6 5': log with NCCL_DEBUG=INFO, and keep the lines of rank 0 whole"
        )
    size = max(len(ring) for rings in found for ring in rings)
    largest = set(map(tuple, (rings for rings in found if len(rings[0]) == size)))
    if len(largest) > 1:
        raise ValueError(
            f"{len(largest)} communicators of {size} ranks with different rings: keep the lines of one"
        )
    (rings,) = largest
    check_rings(rings, size)
    return rings


def _communicators(text: str) -> Iterator[list[Ring]]:
    """The rings of each communicator: lines of one process that count channels from 0 up."""
    found: list[tuple[int, dict[int, Ring]]] = []
    latest: dict[tuple[str, int], dict[int, Ring]] = {}
    for match in filter(None, (_RING.match(line.split("#")[0]) for line in text.splitlines())):
        key, channel = (match["who"], int(match["channels"])), int(match["channel"])
        if key not in latest or channel in latest[key]:
            latest[key] = {}
            found.append((key[1], latest[key]))
        ring = tuple(map(int, match["ranks"].split()))
        latest[key][channel] = _continued(ring, channel, text) if match["cut"] else ring
    for channels, rings in found:
        missing = min(set(range(channels)) - set(rings), default=0)
        if rings.keys() != set(range(channels)):
            raise ValueError(
                f"the log has {len(rings)} of {channels} channels; channel {missing} is amiss"
            )
        yield [rings[channel] for channel in range(channels)]


def _continued(start: Ring, channel: int, text: str) -> Ring:
    """The ring of a line that NCCL cut, from lines of other ranks; ``start`` is what it shows of whole numbers. A rank
    connects its rings before its trees, so the connections above its line "Connected all rings" are the ring's. Where a
    tree was connected first, a rank has several, and nothing is guessed."""
    follow = _followers(text, channel, _NEXT) or _followers(text, channel, _SENDS)
    ring, targets = [0], follow.get(0, set())
    while len(targets) == 1 and 0 not in targets and len(ring) <= len(follow):
        ring += targets
        targets = follow.get(ring[-1], set())
    several = ", ".join(map(str, sorted(targets)))
    if targets == {0} and tuple(ring[: len(start)]) == start and len(ring) == len(follow):
        return tuple(ring)
    if len(targets) > 1:
        why = f"of rank {ring[-1]} the log has connections to ranks {several}"
    elif targets == {0}:
        why = "the connections of other lines are not those of this ring"
    else:
        why = f"no other line tells where rank {ring[-1]} sends"
    begun = " ".join(map(str, start[:4]))
    wrong = f"NCCL cut the ring of channel {channel} at 127 characters, as 2.23.4 and later do"
    advice = 'log every rank with NCCL_DEBUG_SUBSYS=INIT,GRAPH, which adds lines like "Ring 00 : 3 -> 0 -> 1"'
    raise ValueError(f"{wrong}: 'Channel ... : {begun} ...'; {why}: {advice}")


def _followers(text: str, channel: int, pattern: re.Pattern[str]) -> dict[int, set[int]]:
    """By rank, the ranks that it sends to on a channel, before its process has connected all rings."""
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
    """The tree of every channel, from lines ``Trees [0] 1/-1/-1->0->-1 ...`` that every rank writes (init.cc:1485)."""
    by_channel: dict[int, dict[int, tuple[int, ...]]] = {}
    for line in text.splitlines():
        for match in _TREE.finditer(found[1] if (found := _TREES.search(line)) else ""):
            channel, *children, rank = map(int, match.groups())
            below = tuple(child for child in children if child >= 0)
            if by_channel.setdefault(channel, {}).setdefault(rank, below) != below:
                raise ValueError(
                    f"two trees of channel {channel} for rank {rank}: keep the lines of one communicator"
                )
    if not by_channel:
        return None
    size = 1 + max(
        rank
        for tree in by_channel.values()
        for ranks in tree.items()
        for rank in (ranks[0], *ranks[1])
    )
    for channel, tree in sorted(by_channel.items()):
        if missing := sorted(set(range(size)) - set(tree)):
            raise ValueError(
                f"no line 'Trees [{channel}] ...' of rank {missing[0]}: every rank writes one, so keep the logs of all"
            )
    return tuple(
        tuple(tree[rank] for rank in range(size)) for _, tree in sorted(by_channel.items())
    )
