"""Sentences on buckets: who lost, gained or reordered its members, merged, split, changed its
group.
"""

import pytest

from pytest_gtrainer.graphtext import diff

HEAD = """\
fsdp = group(range(0, 2))
for i in P.layers[0:3]:
  P.L.w1.weight: f32[2, 4]
  P.L.w2.weight: f32[2, 4]
  P.L.norm.weight: f32[2]
"""


def gathers(bucket: str, *members: str, number: str = "", group: str = "fsdp") -> str:
    """A bucketed all-gather of the parameters."""
    inputs = ", ".join(f"P.layers[{member[0]}].{member[2:]}.weight" for member in members)
    return (
        f"if fwd:\n  with bucket({bucket}):\n"
        f"    cat: bf16[8] = aten.cat([{inputs}])\n"
        f"    all_gather_into_tensor{number}: bf16[16] = "
        f"_c10d_functional.all_gather_into_tensor(cat, 2, {group})\n"
    )


def scatters(bucket: str, *members: str) -> str:
    """A bucketed reduce-scatter of their gradients, and these as outputs."""
    outputs = "".join(
        f"  layers[{member[0]}].{member[2:]}.weight = bwd.bucket({bucket}).split[{place}]\n"
        for place, member in enumerate(members)
    )
    return (
        f"if bwd:\n  with bucket({bucket}):\n"
        "    reduce_scatter_tensor: f32[8] = _c10d_functional.reduce_scatter_tensor(I.x, "
        "'avg', 2, fsdp)\n"
        "    wait_tensor: f32[8] = _c10d_functional.wait_tensor(reduce_scatter_tensor)\n"
        f"    split: [f32[4], f32[4], f32[4]] = aten.split_with_sizes(wait_tensor, [4, 4, 4])\n"
        f"if out:\n{outputs}"
    )


def layer(number: int, *modules: str) -> tuple[str, ...]:
    return tuple(f"{number}.{module}" for module in modules)


def words(old: str, new: str) -> list[str]:
    """The sentences, without the verdict."""
    return diff(HEAD + old, HEAD + new).partition("\n\n")[0].splitlines()[1:]


def every(*modules: str, make=gathers) -> str:
    return "".join(make(f"layers[{number}]", *layer(number, *modules)) for number in range(3))


ALL = every("w1", "w2", "norm")


def test_a_bucket_lost_a_parameter():
    """The example of the design."""
    whole, less = (
        scatters("layers[2]", *layer(2, *modules)) for modules in (("w1", "norm"), ("w1",))
    )
    assert words(whole, less)[0] == "RS bucket layers.2/bwd lost layers.2.norm.weight"


def test_all_buckets_lost_one():
    assert words(ALL, every("w1", "w2")) == [
        "AG bucket layers[0..2]/fwd lost layers[0..2].norm.weight"
    ]


def test_a_bucket_gained_parameters():
    assert words(every("w1"), ALL) == [
        "AG bucket layers[0..2]/fwd gained layers[0..2].w2.weight, layers[0..2].norm.weight"
    ]


def test_a_bucket_gained_a_parameter_that_it_has_already():
    """Once more is one member more."""
    once, twice = (
        gathers("layers[0]", *layer(0, *names)) for names in (("w1", "w2"), ("w1", "w2", "w1"))
    )
    assert words(once, twice)[0] == "AG bucket layers.0/fwd gained layers.0.w1.weight"
    assert words(twice, once)[0] == "AG bucket layers.0/fwd lost layers.0.w1.weight"


def test_members_stand_in_another_order():
    expected = "AG bucket layers[0..2]/fwd: members in another order: w2.weight where w1.weight was"
    assert words(ALL, every("w2", "w1", "norm")) == [expected]


def test_gradients_stand_in_another_order():
    old, new = every("w1", "w2", make=scatters), every("w2", "w1", make=scatters)
    expected = "RS bucket layers[0..2]/bwd: members in another order: w2.weight where w1.weight was"
    assert words(old, new)[0] == expected


def test_other_orders_of_gathers_do_not_hide_those_of_gradients():
    """However many there are: a gradient's bits may depend on the order, a gathered parameter's do
    not.
    """
    plan = {
        "a": ("0.w1", "0.w2"),
        "b": ("0.norm", "1.w1"),
        "c": ("1.w2", "1.norm"),
        "d": ("2.w1", "2.w2"),
    }
    old, new = (
        "".join(gathers(bucket, *members[::step]) for bucket, members in plan.items())
        + scatters("layers[2]", *layer(2, "w1", "w2")[::step])
        for step in (1, -1)
    )
    assert any(
        sentence.startswith("RS bucket layers.2/bwd: members in another order")
        for sentence in words(old, new)
    )


def test_the_order_of_outputs_is_not_that_of_members():
    """The twin: gradients have the place that they are taken from."""
    text = scatters("layers[2]", *layer(2, "w1", "w2"))
    *head, one, other = text.splitlines(keepends=True)
    assert words(text, "".join([*head, other, one])) == ["outputs are in another order"]


def test_what_another_collective_gathered_is_no_member():
    gathered = gathers("layers[0]", *layer(0, "w1", "w2"))
    payload = "bucket(layers[0]).all_gather_into_tensor"
    again = (
        f"  with m:\n    wait_tensor: bf16[16] = _c10d_functional.wait_tensor({payload})\n"
        "    all_gather_into_tensor: bf16[32] = "
        "_c10d_functional.all_gather_into_tensor(wait_tensor, 2, fsdp)\n"
    )
    assert words(gathered + again, gathered) == [
        "all_gather_into_tensor: 2 became 1",
        "wait_tensor: 1 became 0",
        "fwd m: lost _c10d_functional.wait_tensor, _c10d_functional.all_gather_into_tensor",
    ]


@pytest.mark.parametrize("other", ["I.x", "B.scale"])
def test_a_payload_with_anything_else_is_no_bucket_of_its_parameters(other):
    """Nobody knows what the order means of a payload that holds an input or a buffer, too."""
    inputs = "if B:\n  B.scale: f32[2]\nif I:\n  I.x: f32[2]\n"
    old, new = (
        inputs + gathers("layers[0]", *layer(0, *names)).replace("weight])", f"weight, {other}])")
        for names in (("w1", "w2"), ("w2", "w1"))
    )
    said = words(old, new)
    assert said
    assert not any("AG bucket" in line for line in said), said


@pytest.mark.parametrize(("one", "other"), [(0, 1), (2, 10), (9, 10), (3, 11)])
def test_more_than_ten_gradients_stand_in_another_order(one, other):
    """The tenth stands behind the second."""
    names = [f"m{number}" for number in range(12)]
    old = scatters("layers[2]", *layer(2, *names))
    names[one], names[other] = names[other], names[one]
    assert words(old, scatters("layers[2]", *layer(2, *names)))[0] == (
        f"RS bucket layers.2/bwd: members in another order: m{other}.weight where m{one}.weight was"
    )


def test_the_same_order_is_not_told():
    """The twin: another operator in the bucket says nothing of its members."""
    said = words(ALL, ALL.replace("aten.cat", "aten.concat"))
    assert said == ["fwd bucket layers[0..2]: lost aten.cat, gained aten.concat"]


def test_buckets_merged():
    merged = gathers(
        "layers[0], layers[1]", *layer(0, "w1", "w2", "norm"), *layer(1, "w1", "w2", "norm")
    )
    rest = gathers("layers[2]", *layer(2, "w1", "w2", "norm"))
    assert words(ALL, merged + rest) == [
        "AG buckets layers.0/fwd and layers.1/fwd merged into bucket layers.0+layers.1/fwd",
        "all_gather_into_tensor: 3 became 2",
    ]


def test_buckets_split():
    parts = gathers("layers[2].w1, layers[2].w2", *layer(2, "w1", "w2")) + gathers(
        "layers[2].norm", "2.norm"
    )
    old = gathers("layers[2]", *layer(2, "w1", "w2", "norm"))
    assert words(old, parts) == [
        "AG bucket layers.2/fwd split into bucket layers.2.w1+layers.2.w2/fwd (2 members), "
        "bucket layers.2.norm/fwd (1 members)",
        "all_gather_into_tensor: 1 became 2",
    ]


def test_a_parameter_moved_to_another_bucket():
    new = gathers("layers[0]", *layer(0, "w1", "w2")) + gathers(
        "layers[1]", "0.norm", *layer(1, "w1", "w2", "norm")
    )
    old = "".join(gathers(f"layers[{n}]", *layer(n, "w1", "w2", "norm")) for n in (0, 1))
    assert (
        words(old, new)[0]
        == "AG bucket layers.0/fwd lost layers.0.norm.weight to bucket layers.1/fwd"
    )


def test_buckets_lost_and_gained():
    fewer = gathers("layers[0]", *layer(0, "w1", "w2", "norm"))
    assert (
        words(ALL, fewer)[0]
        == "lost AG bucket layers[1, 2]/fwd of w1.weight, w2.weight, norm.weight"
    )
    assert (
        words(fewer, ALL)[0]
        == "gained AG bucket layers[1, 2]/fwd of w1.weight, w2.weight, norm.weight"
    )


SINGLE = "".join(
    f"if fwd:\n  with layers[{number}].{module}:\n    all_gather_into_tensor: f32[4, 4] = "
    f"_c10d_functional.all_gather_into_tensor(P.layers[{number}].{module}.weight, 2, fsdp)\n"
    for number in range(3)
    for module in ("w1", "w2", "norm")
)


def test_bucketed_and_not_bucketed():
    assert words(SINGLE, ALL)[0] == (
        "AG layers[0..2].w1/fwd, layers[0..2].w2/fwd, layers[0..2].norm/fwd merged into "
        "bucket layers[0..2]/fwd"
    )
    assert words(ALL, SINGLE)[0] == (
        "AG bucket layers[0..2]/fwd split into 3 collectives, of w1.weight, w2.weight, norm.weight"
    )


def test_forward_and_backward_have_buckets_of_their_own():
    again = ALL + every("w1", "w2", "norm").replace("if fwd", "if bwd")
    less = ALL + every("w1", "w2").replace("if fwd", "if bwd")
    assert words(again, less) == ["AG bucket layers[0..2]/bwd lost layers[0..2].norm.weight"]


# -- process groups

TWO_GROUPS = "fsdp_2 = group(range(0, 2))\n"


def test_another_process_group():
    other = ALL.replace("cat, 2, fsdp", "cat, 2, fsdp_2")
    keeps = (
        "if fwd:\n  with m:\n    x: f32[4] = "
        "_c10d_functional.all_reduce(P.layers[0].norm.weight, 'sum', fsdp)\n"
    )
    assert words(TWO_GROUPS + ALL + keeps, TWO_GROUPS + other + keeps) == [
        "process group of AG layers[0..2]/fwd: fsdp became fsdp_2"
    ]


@pytest.mark.parametrize("numbers", [("fsdp", "fsdp_2"), ("fsdp_2", "fsdp")])
def test_groups_that_only_exchanged_their_numbers(numbers):
    """The twin: the group is the same, under the name that another schedule gives it."""
    one, two = numbers
    uses = gathers("layers[0]", "0.w1", group="fsdp") + gathers("layers[1]", "1.w1", group="fsdp_2")
    exchanged = gathers("layers[0]", "0.w1", group=one) + gathers("layers[1]", "1.w1", group=two)
    text = diff(HEAD + TWO_GROUPS + uses, HEAD + TWO_GROUPS + exchanged)
    assert text == "" or text.startswith(
        "same dataflow, same schedule: only the spelling differs\n\n"
    )


def test_other_ranks():
    assert diff(HEAD + ALL, HEAD.replace("range(0, 2)", "range(0, 4)") + ALL).splitlines()[1] == (
        "process group fsdp: group(range(0, 2)) became group(range(0, 4))"
    )


def test_groups_lost_and_gained():
    assert words(ALL, TWO_GROUPS + ALL) == ["gained process group fsdp_2 = group(range(0, 2))"]
    assert words(TWO_GROUPS + ALL, ALL) == ["lost process group fsdp_2 = group(range(0, 2))"]


# -- layouts

LAYOUT = """\
# gtrainer graph v2
# view: layout
fsdp = group(range(0, 2))
for i in all_gather.layers[0:3]:  # x3
  payload(fsdp, bf16, fwd, bytes=32)
  L.w1.weight: at(0, bytes=16)
  L.w2.weight: at(16, bytes=16)
"""


def test_a_layout_says_the_same_of_its_payloads():
    swapped = LAYOUT.replace("L.w1", "L.w0").replace("L.w2", "L.w1").replace("L.w0", "L.w2")
    words = diff(LAYOUT, swapped).partition("\n\n")[0].splitlines()
    assert (
        words[0]
        == "AG bucket layers[0..2]/layout: members in another order: w2.weight where w1.weight was"
    )
    less = LAYOUT.replace("  L.w2.weight: at(16, bytes=16)\n", "")
    assert diff(LAYOUT, less).startswith(
        "AG bucket layers[0..2]/layout lost layers[0..2].w2.weight\n"
    )


def test_what_else_changed_of_a_layout():
    words = diff(LAYOUT, LAYOUT.replace("bf16", "f32")).partition("\n\n")[0]
    assert words == (
        "all_gather layers[0..2]: lost payload(fsdp, bf16, fwd, bytes=32), gained "
        "payload(fsdp, f32, fwd, bytes=32)"
    )
