"""Layouts differ in words: which bucket, which parameter, where it sits and where it belongs."""

import pytest
import torch

from pytest_gtrainer import BucketLayout, assert_same_layout, facts
from pytest_gtrainer.graph.layout import LayoutDifference, Payload, Slot

W1, W2, SCALE = "layers.0.w1.weight", "layers.0.w2.weight", "layers.0.scale"


def payload(*sizes, collective="reduce_scatter", dtype=torch.float32, ranks=(0, 1), op="avg"):
    slots, offset = [], 0
    for name, nbytes in sizes:
        slots.append(Slot(name, offset, nbytes))
        offset += nbytes
    return Payload(collective, dtype, ranks, op, tuple(slots))


EXPECTED = payload((W1, 8), (W2, 12))


def difference(*actual):
    with pytest.raises(LayoutDifference) as failure:
        assert_same_layout(BucketLayout(actual), BucketLayout((EXPECTED,)))
    return str(failure.value).splitlines()[1:]


def test_equal_layouts_pass_whatever_the_order_of_collectives():
    other = payload((SCALE, 4), collective="all_gather", op="")
    assert_same_layout(BucketLayout((EXPECTED, other)), BucketLayout((other, EXPECTED)))


def test_a_collective_that_nobody_compares_is_refused():
    """It was passed over."""
    strange = payload((SCALE, 4), collective="all_to_all")
    for layouts in (((EXPECTED, strange), (EXPECTED,)), ((EXPECTED,), (EXPECTED, strange))):
        with pytest.raises(
            ValueError, match=r"layout has a collective 'all_to_all'; expected all_gather"
        ):
            assert_same_layout(*map(BucketLayout, layouts))


def test_swapped_members_are_named_with_both_places():
    """D2: names the parameters of the bucket."""
    assert difference(payload((W2, 12), (W1, 8))) == [
        f"bucket 'layers.0', reduce_scatter: {W1} sits at byte 12, expected 0",
        f"bucket 'layers.0', reduce_scatter: {W2} sits at byte 0, expected 8",
    ]


def test_a_lost_and_a_foreign_parameter_are_named():
    """B6."""
    assert difference(payload((W1, 8), (SCALE, 4))) == [
        f"bucket 'layers.0', reduce_scatter: {W2} is missing",
        f"bucket 'layers.0', reduce_scatter: {SCALE} does not belong here",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": torch.bfloat16}, "dtype is torch.bfloat16, expected torch.float32"),
        ({"ranks": (0, 2)}, "ranks is (0, 2), expected (0, 1)"),
        ({"op": "sum"}, "op is sum, expected avg"),
    ],
)
def test_dtype_group_and_op_are_compared(changes, words):
    assert difference(payload((W1, 8), (W2, 12), **changes)) == [
        f"bucket 'layers.0', reduce_scatter: {words}"
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "ranks"),
    [("sum", "premul_sum(1.0)", 2), ("avg", "premul_sum(0.5)", 2), ("premul_sum(0.25)", "avg", 4)],
)
def test_a_premultiplied_sum_equals_what_gives_the_same_bits(ours, theirs, ranks):
    """D18: by one, and by 1/n of a power of two: multiplying then only moves exponents."""
    both = [
        BucketLayout((payload((W1, 8), ranks=tuple(range(ranks)), op=op),)) for op in (ours, theirs)
    ]
    assert_same_layout(*both)


@pytest.mark.parametrize(
    ("ours", "theirs", "ranks"),
    [
        ("avg", f"premul_sum({1 / 3})", 3),
        ("sum", "premul_sum(0.5)", 2),
        ("premul_sum(0.25)", "avg", 2),
    ],
)
def test_another_premultiplied_sum_is_named_beside_what_stands_in_its_place(ours, theirs, ranks):
    """The twin: a third is rounded before the sum, where an average may divide after it."""
    both = [
        BucketLayout((payload((W1, 8), ranks=tuple(range(ranks)), op=op),)) for op in (ours, theirs)
    ]
    with pytest.raises(LayoutDifference) as failure:
        assert_same_layout(*both)
    assert f"op is {ours}, expected {theirs} (premul_sum multiplies each rank's gradient" in str(
        failure.value
    )


def test_another_size_at_the_same_place_is_told():
    """D4: the last parameter's width moves nobody else."""
    assert difference(payload((W1, 8), (W2, 16))) == [
        f"bucket 'layers.0', reduce_scatter: {W2} has 16 bytes, expected 12"
    ]


def test_layers_that_begin_alike_are_not_taken_for_each_other():
    """layers.1 and layers.10, norm_out and norm_out_proj: by whole components."""
    names = ["layers.1.w", "layers.10.w", "layers.1.w_proj", "norm_out.w", "norm_out_proj.w"]
    buckets = [
        payload((names[0], 8), (names[2], 4)),
        *(payload((name, 8)) for name in (names[1], *names[3:])),
    ]
    assert [bucket.label for bucket in buckets] == [
        "layers.1",
        "layers.10",
        "norm_out",
        "norm_out_proj",
    ]
    other = [payload((names[1], 8), (names[2], 4)), payload((names[0], 8)), *buckets[2:]]
    with pytest.raises(LayoutDifference) as failure:
        assert_same_layout(BucketLayout(tuple(other)), BucketLayout(tuple(buckets)))
    assert str(failure.value).splitlines()[1:] == [
        "bucket 'layers.1', reduce_scatter: layers.1.w is missing",
        "bucket 'layers.1', reduce_scatter: layers.10.w does not belong here",
        "bucket 'layers.10': no reduce_scatter of layers.10.w",
        "bucket 'layers.1': a reduce_scatter of layers.1.w that is not expected",
    ]


def test_a_bucket_split_in_two_and_a_missing_one_are_told():
    assert difference(payload((W1, 8)), payload((W2, 12))) == [
        f"bucket 'layers.0', reduce_scatter: {W2} is missing",
        f"bucket 'layers.0': a reduce_scatter of {W2} that is not expected",
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_payloads_that_share_parameters_the_one_that_shares_most_is_compared(order):
    parts = [payload((W1, 8)), payload((W2, 12), (SCALE, 4))][::order]
    with pytest.raises(LayoutDifference) as failure:
        assert_same_layout(
            BucketLayout(tuple(parts)), BucketLayout((payload((W2, 12), (SCALE, 4), (W1, 8)),))
        )
    assert str(failure.value).splitlines()[1:] == [
        f"bucket 'layers.0', reduce_scatter: {W1} is missing",
        f"bucket 'layers.0': a reduce_scatter of {W1} that is not expected",
    ]


def test_a_payload_that_is_reduced_twice_is_told():
    """A10, C4: RS(a) + RS(b) is not RS(a + b) in bits."""
    assert difference(EXPECTED, EXPECTED) == [
        f"bucket 'layers.0': a reduce_scatter of {W1}, {W2} that is not expected"
    ]


def test_another_collective_in_its_place_is_told():
    assert difference(payload((W1, 8), (W2, 12), collective="all_gather")) == [
        f"bucket 'layers.0': an all_gather of {W1}, {W2} that is not expected",
        f"bucket 'layers.0': no reduce_scatter of {W1}, {W2}",
    ]


def test_long_differences_are_cut_and_counted():
    """Ten parameters in ten buckets: three a bucket, 24 lines in all."""
    names = [[f"layers.{layer}.p{index}.weight" for index in range(10)] for layer in range(10)]
    expected = BucketLayout(tuple(payload(*((name, 4) for name in bucket)) for bucket in names))
    actual = BucketLayout(
        tuple(payload(*((name, 4) for name in reversed(bucket))) for bucket in names)
    )
    with pytest.raises(LayoutDifference) as failure:
        assert_same_layout(actual, expected)
    lines = str(failure.value).splitlines()
    assert lines[4] == "bucket 'layers.0', reduce_scatter: and 7 more parameters of it elsewhere"
    assert len(lines) == 1 + 24 + 1
    assert lines[-1] == "and 16 more differences"


def test_what_is_compared_is_told_to_those_who_watch():
    """Reports show both layouts, and every problem, also those that the message cuts."""
    found = []
    other = payload((W2, 12), (W1, 8))
    with facts.watching({"layouts": lambda **layouts: found.append(layouts)}):
        assert_same_layout(BucketLayout((EXPECTED,)), BucketLayout((EXPECTED,)))
        problems = difference(other)
    assert found == [
        {
            "actual": BucketLayout((one,)),
            "expected": BucketLayout((EXPECTED,)),
            "problems": list_,
            "actual_is": "graph",
        }
        for one, list_ in ((EXPECTED, []), (other, problems))
    ]


def test_nothing_to_compare_is_an_error():
    with pytest.raises(ValueError, match="the expected layout has no collective of parameters"):
        assert_same_layout(BucketLayout((EXPECTED,)), BucketLayout(()))


def test_the_text_shows_offsets_and_sizes():
    text = str(BucketLayout((EXPECTED,))).splitlines()
    assert text[0] == "layers.0: reduce_scatter avg float32 over 2 ranks"
    assert text[2].split() == ["8", "12", W2]


@pytest.mark.parametrize(
    ("slots", "fault"),
    [
        ([(W1, 0, 8), (W1, 8, 8), (W2, 16, 12)], f"{W1} has two places"),
        ([(W1, 0, 8), (W2, 8, 12), (W2, 20, 12)], f"{W2} has two places"),
        ([(W1, 0, 8), (W2, 0, 12)], f"{W1} and {W2} lie on each other at byte 0"),
        ([(W1, 0, 8), (W2, 4, 12)], f"{W1} and {W2} lie on each other at byte 4"),
        (
            [(W1, 0, 20), (SCALE, 4, 4), (W2, 8, 12)],
            f"{W1} and {W2} lie on each other at byte 8",
        ),
    ],
)
def test_a_layout_that_no_collective_can_have_is_no_green(slots, fault):
    """Also where both sides have it: a parameter has one place, and shares it with no other."""
    wrong = BucketLayout(
        (Payload("all_gather", torch.float32, (0, 1), "", tuple(Slot(*slot) for slot in slots)),)
    )
    with pytest.raises(LayoutDifference) as failure:
        assert_same_layout(wrong, wrong)
    assert f"bucket 'layers.0', all_gather: {fault}" in str(failure.value).splitlines()


def test_places_of_no_bytes_may_be_one():
    """A rank may have no row of a parameter; the next one then begins at the same byte."""
    slots = (Slot(W1, 0, 8), Slot(SCALE, 8, 0), Slot(W2, 8, 12))
    layout = BucketLayout((Payload("all_gather", torch.float32, (0, 1), "", slots),))
    assert_same_layout(layout, layout)


@pytest.mark.parametrize("left_out", [W1, SCALE, W2])
def test_a_part_that_is_gathered_again_leaves_out_the_zeros_behind_what_it_leaves_out(left_out):
    """Each parameter has zeros behind it, of a width of its own."""
    both, widths = ("fwd", "bwd"), {W1: (8, 4), SCALE: (4, 12), W2: (12, 8)}

    def gathered(names, directions, more=0):
        slots, offset, padding = [], 0, 0
        for name in names:
            nbytes, zeros = widths[name]
            slots.append(Slot(name, offset, nbytes))
            offset, padding = offset + nbytes + zeros + more, padding + zeros + more
        return Payload("all_gather", torch.float32, (0, 1), "", tuple(slots), directions, padding)

    expected = BucketLayout((gathered(widths, both),))
    part = [name for name in widths if name != left_out]
    again = gathered(part, ("bwd",))
    unread = assert_same_layout(BucketLayout((gathered(widths, ("fwd",)), again)), expected)
    assert unread == (f"bucket 'layers.0': no node of the backward reads {left_out}",)

    # What expects one such collective does not expect two, nor one that is cut in two.
    halves = [gathered([name], ("bwd",)) for name in part]
    for several in ([again, again], halves):
        with pytest.raises(LayoutDifference) as failure:
            assert_same_layout(BucketLayout((gathered(widths, ("fwd",)), *several)), expected)
        names = ", ".join(several[-1].parameters)
        extra = f"bucket 'layers.0': an all_gather of {names} that is not expected"
        assert extra in str(failure.value).splitlines()

    wider = gathered(part, ("bwd",), more=4)
    with pytest.raises(LayoutDifference, match="bytes belong to no parameter, expected"):
        assert_same_layout(BucketLayout((gathered(widths, ("fwd",)), wider)), expected)
