"""Rings from files and logs (S6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gtrainer import NetModel
from pytest_gtrainer.worlds.simulated.logs import read_rings, rings_from_log
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
    assert rings_from_log(small + lines[1] + other + lines[2] + more + LOG) == rings_from_log(LOG)


def test_comments_in_a_file(tmp_path):
    """Behind a ring, and instead of one."""
    text = "# Channel 00/01 : 1 0\nChannel 00/01 : 0 1  # as it was\n"
    (tmp_path / "two.rings").write_text(text)
    assert read_rings(tmp_path / "two.rings") == ((0, 1),)


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("no such line", "no line like 'Channel 00/08 : 0 7 6 5': log with NCCL_DEBUG=INFO"),
        ("Channel 00/16 : 0 1 2 ...", "keep the lines of rank 0 whole"),
        ("Channel 00/02 : 0 1", "the log has 1 of 2 channels; channel 1 is amiss"),
        ("Channel 00/01 : 0 1 3", "the ring of channel 0 visits rank 3, but ranks are 0..2"),
        ("Channel 00/01 : 0 1\na Channel 00/01 : 1 0", "2 communicators of 2 ranks with different rings"),
    ],
)
def test_a_log_without_usable_rings_is_refused_in_a_sentence(log, sentence):
    with pytest.raises(ValueError, match=sentence):
        rings_from_log(log)


def test_a_file_is_named_in_the_refusal(tmp_path):
    (tmp_path / "empty.rings").write_text("# nothing\n")
    with pytest.raises(ValueError, match=r"empty\.rings: no line like"):
        read_rings(tmp_path / "empty.rings")


@pytest.mark.parametrize("path", sorted(NETS.glob("*.rings")), ids=lambda path: path.stem)
def test_presets_are_nets_of_two_nodes(path):
    net = NetModel.from_log(path, nodes=2)
    assert net.size == len(net.rings[0])
    assert "# Source: " in path.read_text()


@pytest.mark.parametrize(
    ("name", "visible"), [("a100_2x8_efa", True), ("a100_2x4_ib", True), ("a100_2x4_ib_one_ring", False)]
)
def test_which_preset_sees_the_order_of_a_bucket(name, visible):
    """S1: one and the same hardware shows the order or hides it, with the rings that NCCL chose."""
    assert sees_the_order_of_a_bucket(NetModel.from_log(NETS / f"{name}.rings", nodes=2)) == visible
