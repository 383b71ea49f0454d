"""Arguments of a ``gt_world`` marker: each bound from both sides."""

import math
from types import SimpleNamespace

import pytest

from pytest_gtrainer.marker import spec_of, valid_spec_of
from pytest_gtrainer.worlds.spec import SpecError, make_spec

REFUSED = [
    ({"timeout": 0}, "timeout is a number of seconds above 0; not 0"),
    ({"timeout": 0.0}, "timeout is a number of seconds above 0; not 0.0"),
    ({"timeout": math.inf}, "timeout is a number of seconds above 0; not inf"),
    ({"timeout": math.nan}, "timeout is a number of seconds above 0; not nan"),
    ({"timeout": True}, "timeout is a number of seconds above 0; not True"),
    ({"timeout": "5"}, "timeout is a number of seconds above 0; not '5'"),
    ({"size": 4, "rank": 4}, r"rank lies in 0\.\.3; not 4"),
    ({"size": 4, "rank": -1}, r"rank lies in 0\.\.3; not -1"),
    ({"size": 4, "rank": True}, r"rank lies in 0\.\.3; not True"),
    ({"mesh": {"dp": 2, "tp": 2}, "rank": 4}, r"rank lies in 0\.\.3; not 4"),
    ({"size": 0}, "size is a whole number, 1 or more; not 0"),
    ({"size": True}, "size is a whole number, 1 or more; not True"),
    ({"mesh": {"dp": 2}, "size": 0}, "size is a whole number, 1 or more; not 0"),
    ({"mesh": {"dp": 2, "tp": 0}}, "mesh dimension 'tp' is a whole number, 1 or more; not 0"),
    ({"mesh": {}}, "mesh maps dimension names to extents.*not {}"),
    ({"mesh": {0: 2}}, "mesh maps dimension names to extents.*not {0: 2}"),
    ({"mesh": {"dp": 2, "tp": 3}, "size": 5}, "mesh dp=2 x tp=3 multiplies to 6, but its size is"),
    ({"size": 4, "nodes": 0}, "nodes is a whole number, 1 or more; not 0"),
    ({"size": 4, "nodes": 3}, "4 ranks do not divide over 3 nodes"),
    ({"device": "gpu"}, "device is one of .*; not 'gpu'"),
    ({"sizes": 4, "node": 1}, "takes size, mesh, .*; not node, sizes"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_what_no_world_can_be_is_told_with_its_value(fields, words):
    with pytest.raises(SpecError, match=f"gt_world.*{words}"):
        make_spec("fake", **fields)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, {"size": 8, "mesh": {"fsdp": 8}, "rank": 0, "nodes": 1, "timeout": None}),
        ({"timeout": 5}, {"timeout": 5.0}),
        ({"timeout": 1e-3}, {"timeout": 1e-3}),
        ({"size": 1}, {"size": 1, "mesh": {"fsdp": 1}}),
        ({"size": 4, "rank": 3}, {"rank": 3}),
        ({"mesh": {"dp": 3, "tp": 2}, "rank": 5}, {"size": 6, "rank": 5}),
        ({"mesh": {"dp": 3, "tp": 2}, "size": 6}, {"size": 6, "mesh": {"dp": 3, "tp": 2}}),
        ({"size": 4, "nodes": 4}, {"nodes": 4}),
    ],
    ids=str,
)
def test_what_a_world_may_be(fields, found):
    spec = make_spec("fake", **fields)
    assert {name: getattr(spec, name) for name in found} == found


def test_a_simulated_world_is_on_the_cpu():
    assert make_spec("simulated", device="cpu").device == "cpu"
    assert make_spec("ranks", device="cuda").device == "cuda"
    with pytest.raises(SpecError, match="a simulated world adds on the CPU"):
        make_spec("simulated", device="cuda")


def marked(*marks, size=None, above=()):
    """A test with these markers, in a module with those ``above``."""
    module = SimpleNamespace(own_markers=[mark.mark for mark in above], parent=None)
    found = SimpleNamespace(own_markers=[mark.mark for mark in marks], parent=module)
    if size is not None:
        found.callspec = SimpleNamespace(params={"gt_world_size": size})
    return found


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (pytest.mark.gt_world("fake", kind="ranks"), "gt_world got its kind twice"),
        (pytest.mark.gt_world("fake", kind="fake"), "gt_world got its kind twice"),
        (pytest.mark.gt_world("fake", 8), r"one positional argument, the kind; not 2: \('fake', 8"),
        (pytest.mark.gt_world("fake", size=0), "size is a whole number, 1 or more; not 0"),
    ],
    ids=str,
)
def test_a_marker_that_says_two_things_is_told(mark, words):
    with pytest.raises(SpecError, match=words):
        spec_of(marked(mark))
    assert valid_spec_of(marked(mark)) is None


def test_the_nearest_marker_and_the_parametrised_size_count():
    near, far = pytest.mark.gt_world("fake", size=2), pytest.mark.gt_world("ranks", size=4)
    other = pytest.mark.skip
    assert spec_of(marked(near, above=[far])).kind == "fake"
    assert spec_of(marked(other, above=[other, far])).size == 4
    assert spec_of(marked(other)) is None
    assert spec_of(marked(pytest.mark.gt_world(kind="fake", size=3))).size == 3
    assert spec_of(marked(pytest.mark.gt_world("fake", size=[1, 5]), size=5)).size == 5
