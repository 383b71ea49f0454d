"""A parameter that is read twice is gathered once (A11)."""

import pytest
import torch

from pytest_gtrainer import bucket_layout, deduplicate_fsdp_unshard_chains_pass, graphtext
from pytest_gtrainer._torch.passes import ALL_GATHER

pytestmark = pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 4})


def count(gm, target):
    return len(gm.graph.find_nodes(op="call_function", target=target))


def runs_twice(model, tokens):
    return model(tokens).sum() + model(tokens).sum()


@pytest.fixture
def twice(shared_joint):
    """A step that runs the model twice, traced without reuse."""
    return shared_joint(step=runs_twice, reuse_gathers=False)


@pytest.mark.second_tier
def test_the_layout_lists_a_repeated_gather_until_it_is_dropped(twice):
    """A layout that showed it once could not distinguish the two graphs."""
    parameters = len(twice.parameter_fqns)
    assert len(bucket_layout(twice.gm).of("all_gather")) == 2 * parameters
    gm = deduplicate_fsdp_unshard_chains_pass(twice.gm)
    assert len(bucket_layout(gm).of("all_gather")) == parameters


def test_behind_a_write_the_second_gather_is_the_first_of_its_value():
    """A11: the third gather gives what the second one does."""
    gm = deduplicate_fsdp_unshard_chains_pass(graphtext.parse(WRITTEN_BETWEEN))
    gathers = [node.name for node in gm.graph.find_nodes(op="call_function", target=ALL_GATHER)]
    assert gathers == ["gather", "gather_1"], "before the write and behind it one gather each"


WRITTEN_BETWEEN = """\
fsdp = group(range(0, 4))
if P:
  P.layers[0].w: f32[2, 4]
if fwd:
  with layers[0]:
    gather: f32[8, 4] = _c10d_functional.all_gather_into_tensor(P.layers[0].w, 4, fsdp)
    wait: f32[8, 4] = _c10d_functional.wait_tensor(gather)
    written: f32[2, 4] = aten.add_.Tensor(P.layers[0].w, 1)
    gather_1: f32[8, 4] = _c10d_functional.all_gather_into_tensor(P.layers[0].w, 4, fsdp)
    wait_1: f32[8, 4] = _c10d_functional.wait_tensor(gather_1)
    gather_2: f32[8, 4] = _c10d_functional.all_gather_into_tensor(P.layers[0].w, 4, fsdp)
    wait_2: f32[8, 4] = _c10d_functional.wait_tensor(gather_2)
if out:
  yield fwd.layers[0].wait
  yield fwd.layers[0].wait_1
  yield fwd.layers[0].wait_2
"""


COMPUTED = """\
fsdp = group(range(0, 4))
if P:
  P.layers[0].w: f32[2, 4]
if fwd:
  with layers[0]:
    a: f32[2, 4] = FIRST
    gather: f32[8, 4] = _c10d_functional.all_gather_into_tensor(a, 4, fsdp)
    wait: f32[8, 4] = _c10d_functional.wait_tensor(gather)
    b: f32[2, 4] = SECOND
    gather_1: f32[8, 4] = _c10d_functional.all_gather_into_tensor(b, 4, fsdp)
    wait_1: f32[8, 4] = _c10d_functional.wait_tensor(gather_1)
if out:
  yield fwd.layers[0].wait
  yield fwd.layers[0].wait_1
"""


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        ("aten.relu(P.layers[0].w)", "aten.relu(P.layers[0].w)", 1),
        ("aten.relu(P.layers[0].w)", "aten.neg(P.layers[0].w)", 2),
        ("aten.mul.Scalar(P.layers[0].w, 2)", "aten.mul.Scalar(P.layers[0].w, 3)", 2),
        ("aten.sub.Tensor(P.layers[0].w, 1)", "aten.rsub.Scalar(P.layers[0].w, 1)", 2),
        ("aten.rand_like(P.layers[0].w)", "aten.rand_like(P.layers[0].w)", 2),
    ],
)
def test_gathers_of_other_values_of_a_parameter_stay(first, second, left):
    """A11: a model may gather a relu of its parameter besides the parameter."""
    text = COMPUTED.replace("FIRST", first).replace("SECOND", second)
    gm = deduplicate_fsdp_unshard_chains_pass(graphtext.parse(text))
    assert count(gm, ALL_GATHER) == left


PLACES = [
    *("before all", "in the chain", "before the gather", "between"),
    *("in the second chain", "before the second gather", "last"),
]
WRITTEN = {  # where a write stands, of which the gathers have other values
    "P.layers[0].w": ["in the chain", "before the gather", "between"],
    "copy": ["in the chain"],
    "padded": ["before the gather"],
    "copy_1": ["in the second chain"],
    "padded_1": ["before the second gather"],
}


def chains_with_a_write(value, place):
    """Two gathers of a cast and a pad of one parameter, and a write somewhere."""
    lines = [
        "copy: bf16[2, 4] = aten._to_copy(P.layers[0].w, dtype=bf16)",
        "padded: bf16[3, 4] = aten.constant_pad_nd(copy, [0, 0, 0, 1])",
        "gather: bf16[12, 4] = _c10d_functional.all_gather_into_tensor(padded, 4, fsdp)",
        "copy_1: bf16[2, 4] = aten._to_copy(P.layers[0].w, dtype=bf16)",
        "padded_1: bf16[3, 4] = aten.constant_pad_nd(copy_1, [0, 0, 0, 1])",
        "gather_1: bf16[12, 4] = _c10d_functional.all_gather_into_tensor(padded_1, 4, fsdp)",
        "wait: bf16[12, 4] = _c10d_functional.wait_tensor(gather)",
        "wait_1: bf16[12, 4] = _c10d_functional.wait_tensor(gather_1)",
    ]
    after = PLACES.index(place)
    kind = "f32[2, 4]" if value.startswith("P") else f"bf16[{2 + value.startswith('p')}, 4]"
    lines.insert(after, f"written: {kind} = aten.add_.Tensor({value}, 1)")
    head = ["fsdp = group(range(0, 4))", "if P:", "  P.layers[0].w: f32[2, 4]"]
    tail = ["if out:", "  yield fwd.layers[0].wait", "  yield fwd.layers[0].wait_1"]
    inside = ["if fwd:", "  with layers[0]:", *(f"    {line}" for line in lines)]
    return graphtext.parse("\n".join([*head, *inside, *tail]) + "\n")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", WRITTEN)
def test_a_write_to_what_a_gather_is_made_of_keeps_both(value, place):
    """A11: a chain reads its shard long before its gather. What it has read may be written to."""
    known_from = {"copy": 1, "padded": 2, "copy_1": 4, "padded_1": 5}
    if PLACES.index(place) < known_from.get(value, 0):
        with pytest.raises(graphtext.TextError):  # there is no such value yet
            chains_with_a_write(value, place)
        return
    gm = deduplicate_fsdp_unshard_chains_pass(chains_with_a_write(value, place))
    assert count(gm, ALL_GATHER) == (2 if place in WRITTEN[value] else 1)


def test_a_gather_of_the_parameter_and_one_of_its_relu_stay():
    text = COMPUTED.replace("FIRST", "aten.relu(P.layers[0].w)")
    text = text.replace("    b: f32[2, 4] = SECOND\n", "").replace("(b, ", "(P.layers[0].w, ")
    assert count(deduplicate_fsdp_unshard_chains_pass(graphtext.parse(text)), ALL_GATHER) == 2


def test_a_duplicate_that_is_waited_for_first_keeps_the_order():
    """A11: two gathers are in flight, and the second one is read before the first one."""
    text = COMPUTED.replace("FIRST", "aten.alias(P.layers[0].w)")
    text = text.replace("SECOND", "aten.alias(P.layers[0].w)")
    wait = "    wait: f32[8, 4] = _c10d_functional.wait_tensor(gather)\n"
    text = text.replace(wait, "").replace(
        "if out:", f"    read: f32[8, 4] = aten.neg(wait_1)\n{wait}if out:"
    )
    gm = deduplicate_fsdp_unshard_chains_pass(graphtext.parse(text))
    assert count(gm, ALL_GATHER) == 1
    names = [node.name for node in gm.graph.nodes]
    assert names.index("wait") < names.index("read")


def test_nothing_is_left_of_the_duplicates_chain(twice):
    """Its cast goes with it."""
    casts = torch.ops.aten._to_copy.default
    before = count(twice.gm, casts)
    gm = deduplicate_fsdp_unshard_chains_pass(twice.gm)
    assert before - count(gm, casts) == len(twice.parameter_fqns)


def test_a_graph_without_duplicates_is_left_as_it_is(joint):
    before = joint.gm.code
    assert deduplicate_fsdp_unshard_chains_pass(joint.gm).code == before
