"""Rings from files and logs (S6)."""

from pathlib import Path

import pytest
import torch

from pytest_gtrainer import NetModel
from pytest_gtrainer.worlds.simulated.logs import rings_from_log
from pytest_gtrainer.worlds.simulated.rings import rail_rings
from tests.worlds.simulated.buckets import sees_the_order_of_a_bucket

NETS = Path("fixtures/nets")

LOG = """
node0:26:67 [0] NCCL INFO Channel 00/02 :    0   1   2   3
node0:26:67 [0] NCCL INFO Channel 01/02 :    0   3   2   1
node0:26:67 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->3
node0:26:67 [0] NCCL INFO Channel 00/0 : 0[101c0] -> 1[101d0] via P2P/IPC/read
"""


def test_rail_rings_of_eight_gpus():
    """Channel c enters every node at GPU c mod 8 and descends cyclically."""
    rings = rail_rings(nodes=2, ranks_per_node=8, channels=9)
    assert rings[1] == (1, 0, 7, 6, 5, 4, 3, 2, 9, 8, 15, 14, 13, 12, 11, 10)
    assert rings[8] == rings[0]


def test_rings_of_a_log():
    """S6: connections and trees are other lines."""
    assert rings_from_log(LOG) == ((0, 1, 2, 3), (0, 3, 2, 1))


def test_the_largest_communicator_counts():
    """A log holds those of subgroups too, before, after and in between."""
    small = "node0:26:67 [0] NCCL INFO Channel 00/01 : 0 1\n"
    other = "node1:26:67 [0] NCCL INFO Channel 00/02 : 0 2 1\n"
    more = "node1:26:67 [0] NCCL INFO Channel 01/02 : 0 1 2\n"
    lines = LOG.splitlines(keepends=True)
    before = small + lines[1] + other + lines[2] + more + LOG
    for log in (before, small + LOG + other + more, other + more + LOG + small, LOG + small):
        assert rings_from_log(log) == rings_from_log(LOG)


def test_comments_in_a_file(tmp_path):
    """Behind a ring, and instead of one."""
    text = "# Channel 00/01 : 1 0\nChannel 00/01 : 0 1  # as it was\n"
    (tmp_path / "two.rings").write_text(text)
    assert NetModel.from_log(tmp_path / "two.rings", nodes=1).rings == ((0, 1),)


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("no such line", "no line like 'Channel 00/08 : 0 7 6 5': log with NCCL_DEBUG=INFO"),
        ("Channel 00/02 : 0 1", "the log has 1 of 2 channels: channel 1 is missing"),
        (
            "Channel 00/02 : 0 1\nChannel 01/02 : 0 1\nChannel 02/02 : 0 1",
            "the log has 3 of 2 channels: channel 2 is none of them",
        ),
        ("Channel 00/01 : 0 1 3", "the ring of channel 0 visits rank 3, but ranks are 0..2"),
        (
            "Channel 00/01 : 0 1\na Channel 00/01 : 1 0",
            "2 communicators of 2 ranks with different rings",
        ),
    ],
)
def test_a_log_without_usable_rings_is_refused_in_a_sentence(log, sentence):
    with pytest.raises(ValueError, match=sentence):
        rings_from_log(log)


RANKS = 40
STEP = 7  # the ring goes 0, 7, 14, ... modulo 40


def cut_log(*, lines, connect=True):
    """A log of 40 ranks on one channel as NCCL 2.30 writes it, a process a rank: 127 characters of
    the ring.
    """
    ring = [STEP * place % RANKS for place in range(RANKS)]
    header = "Channel 00/01 :" + "".join(f" {rank:2d}" for rank in ring)
    log = [f"n0:100:100 [0] NCCL INFO {header[:124]}..."]
    for rank in reversed(range(RANKS)):
        who, after = (
            f"n{rank // 8}:{100 + rank}:{100 + rank} [{rank % 8}] NCCL INFO",
            (rank + STEP) % RANKS,
        )
        log.append(f"{who} " + lines.format(before=(rank - STEP) % RANKS, rank=rank, after=after))
        log.append(
            f"{who} Channel 00/1 : {rank}[0] -> {(rank + 1) % RANKS}[0] via P2P/IPC"
        )  # of sends and receives
        log += [f"{who} Connected all rings, use ring PXN 0 GDR 1"] if connect else []
        log.append(
            f"{who} Channel 00/0 : {rank}[0] -> {(rank + 3) % RANKS}[0] [send] via NET/IB/0"
        )  # of a tree
    return "\n".join(log), tuple(ring)


@pytest.mark.parametrize(
    "lines",
    [
        "Ring 00 : {before} -> {rank} -> {after}",
        "Channel 00/0 : {rank}[3] -> {after}[4] via P2P/CUMEM/read",
        "Channel 00 : {rank}[101c0] -> {after}[101d0] via SHM/direct/direct",
        "Channel 00/0 : {rank}[3] -> {after}[4] [send] via NET/IB/0/GDRDMA",
    ],
)
def test_a_ring_that_nccl_cut_is_put_together_from_the_lines_of_its_ranks(lines):
    """S6: 38 ranks and more since 2.23.4.

    What connects the trees, and sends and receives, is not the ring's.
    """
    log, ring = cut_log(lines=lines)
    assert rings_from_log(log) == (ring,)


def test_a_cut_ring_that_other_lines_do_not_tell_is_refused():
    """S6: nothing is guessed, and the way to a log that suffices is named."""
    log, _ = cut_log(lines="Channel 00/0 : {rank}[3] -> {after}[4] via P2P/CUMEM")
    ring = (
        "NCCL cut the ring of channel 0 at 127 characters, as 2.23.4 and later do: 'Channel ... : "
        "0 7 14 21 ...'; "
    )
    way_out = (
        r"log every rank with NCCL_DEBUG_SUBSYS=INIT,GRAPH, which adds lines like \"Ring 00 : 3 -> "
        r"0 -> 1\""
    )
    without_rank_5 = "\n".join(
        line for line in log.splitlines() if " : 5[3] -> " not in line and " 5[0] " not in line
    )
    trees_first, _ = cut_log(
        lines="Channel 00/0 : {rank}[3] -> {after}[4] via P2P/CUMEM", connect=False
    )
    other = log.replace(": 0[3] -> 7[4]", ": 0[3] -> 14[4]")
    # A whole ring, but not the one of which NCCL has written the beginning.
    backwards, _ = cut_log(lines="Channel 00/0 : {after}[3] -> {rank}[4] via P2P/CUMEM")
    for text, sentence in [
        (log.splitlines()[0], f"{ring}no other line says where rank 0 sends: {way_out}"),
        (without_rank_5, f"{ring}no other line says where rank 5 sends: {way_out}"),
        (trees_first, f"{ring}of rank 0 the log has connections to ranks 3, 7: {way_out}"),
        (other, f"{ring}the connections of other lines are not those of this ring: {way_out}"),
        (backwards, f"{ring}the connections of other lines are not those of this ring: {way_out}"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            rings_from_log(text)


TREES = """
h:1:1 [0] NCCL INFO Channel 00/02 : 0 1 2 3
h:1:1 [0] NCCL INFO Channel 01/02 : 0 1 2 3
h:1:1 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->2
h:2:2 [1] NCCL INFO Trees [0] 2/-1/-1->1->0 [1] -1/-1/-1->1->0
h:3:3 [2] NCCL INFO Trees [0] 3/-1/-1->2->1 [1] 3/0/-1->2->-1
h:4:4 [3] NCCL INFO Trees [0] -1/-1/-1->3->2 [1] -1/-1/-1->3->2
"""


def test_trees_of_a_log(tmp_path):
    """S6: of every channel, from the lines of all ranks; a ring's net does not ask for them."""
    (tmp_path / "log").write_text(TREES)
    tree = NetModel.from_log(tmp_path / "log", nodes=2, algorithm="tree")
    assert tree.trees == (((1,), (2,), (3,), ()), ((1,), (), (3, 0), ())), (
        "below rank 2 of channel 1 is rank 0, too"
    )
    ranks = [tree.explain("all_reduce", offset, 8, torch.float32).ranks for offset in (0, 7)]
    assert ranks == [(3, 2, 1, 0), (3, 2, (1, 0))]
    assert NetModel.from_log(tmp_path / "log", nodes=2).trees is None
    (tmp_path / "rings").write_text(LOG.replace("Trees", "Three"))
    assert NetModel.from_log(tmp_path / "rings", nodes=2, algorithm="tree").trees is None


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "h:3:3 [2] NCCL INFO Trees",
            "",
            r"log: no line 'Trees \[0\] ...' of rank 2: every rank writes one",
        ),
        ("[1] 1/-1/-1->0", "[1] 1/3/-1->0", "the tree of channel 1: rank 3 has two parents"),
        (
            "[0] 2/-1/-1->1",
            "[0] -1/-1/-1->1",
            "the tree of channel 0: a tree has one root, this one has 2: ranks 0 2",
        ),
        (
            "h:4:4",
            "h:4:4 Trees [0] 1/-1/-1->3->2\nh:4:4",
            "two trees of channel 0 for rank 3: keep the lines of one",
        ),
    ],
)
def test_a_log_without_usable_trees_is_refused_in_a_sentence(tmp_path, old, new, sentence):
    (tmp_path / "log").write_text(TREES.replace(old, new))
    with pytest.raises(ValueError, match=sentence):
        NetModel.from_log(tmp_path / "log", nodes=2, algorithm="tree")


def test_a_file_is_named_in_the_refusal(tmp_path):
    (tmp_path / "empty.rings").write_text("# nothing\n")
    with pytest.raises(ValueError, match=r"empty\.rings: no line like"):
        NetModel.from_log(tmp_path / "empty.rings", nodes=1)


@pytest.mark.parametrize("path", sorted(NETS.glob("*.rings")), ids=lambda path: path.stem)
def test_presets_are_nets_of_two_nodes(path):
    net = NetModel.from_log(path, nodes=2)
    assert net.size == len(net.rings[0])
    assert "# Source: " in path.read_text()


@pytest.mark.parametrize(
    ("name", "visible"),
    [("a100_2x8_efa", True), ("a100_2x4_ib", True), ("a100_2x4_ib_one_ring", False)],
)
def test_which_preset_sees_the_order_of_a_bucket(name, visible):
    """S1: one and the same hardware shows the order or hides it, with the rings that NCCL chose."""
    assert sees_the_order_of_a_bucket(NetModel.from_log(NETS / f"{name}.rings", nodes=2)) == visible
