"""Ranks by their last calls: which differ, who waits for ever, and for whom."""

import json
import sys

import pytest

from pytest_gtrainer.ranks.answers import (
    Call,
    called_by_some,
    differing_call,
    main_thread,
    never_ending,
    read_calls,
    stacks_text,
)

WORLD = "all ranks"


def calls(ranks, *by_rank, first=1, name="0", label=WORLD):
    """Return the calls of ranks on one group: of each (op, dtype, elements, line, pending)."""
    texts = {}
    for rank, own in zip(ranks, by_rank, strict=True):
        made = []
        for number, (op, dtype, elements, line, pending) in enumerate(own, start=first):
            made.append([number, op, dtype, [elements], elements, f"t.py:{line}", pending])
        last = first + len(own) - 1
        texts[rank] = json.dumps({name: [label, list(ranks), last, first, made]})
    return read_calls(texts)


def call(op="all_reduce", dtype="float32", elements=4, line=1, pending=False):
    return op, dtype, elements, line, pending


EQUAL_SIZES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
EQUAL_DTYPES = (*EQUAL_SIZES, "all_to_all", "gather")


@pytest.mark.parametrize("op", [*EQUAL_DTYPES, "scatter", "barrier", "send"])
def test_what_has_to_be_the_same_in_a_call(op):
    """Splits may differ in an all-to-all and in a gather, dtypes may not."""
    other_dtype = calls((0, 1), [call(op)], [call(op, "bfloat16")])
    other_size = calls((0, 1), [call(op)], [call(op, elements=5)])
    assert (differing_call(other_dtype) is not None) == (op in EQUAL_DTYPES)
    assert (differing_call(other_size) is not None) == (op in EQUAL_SIZES)
    assert differing_call(calls((0, 1), [call(op)], [call(op, line=2)])) is None
    assert differing_call(calls((0, 1), [call(op)], [call("all_gather_object")])) is not None


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 5, 7)], ids=str)
def test_a_call_that_differs_is_told_by_rank_place_and_number(ranks):
    odd, same = [call(), call("gather", "bfloat16", 3, 9)], [call(), call("gather", line=8)]
    found = calls(ranks, same, same, odd, first=11, label="dp")
    assert differing_call(found) == (
        f"rank {ranks[2]} called gather of bfloat16[3] at t.py:9, "
        f"ranks {ranks[0]}, {ranks[1]} called gather of float32[4] at t.py:8, "
        "as call 2 of this test on dp"
    )


def test_who_waits_for_ranks_that_have_ended():
    waits = [call(), call(line=3, pending=True)]
    found = calls((0, 1, 2), waits, waits, [call()])
    wants = "wait in all_reduce of float32[4] at t.py:3 on all ranks"
    assert never_ending(found, [0, 1]) == f"ranks 0, 1 {wants}: rank 2 ended without it"
    assert called_by_some(found) == "; ranks 0, 1 alone called all_reduce of float32[4] at t.py:3"
    found = calls((0, 1, 2), waits, [call()], [call()])
    wants = wants.replace("wait", "waits", 1)
    assert never_ending(found, [0]) == f"rank 0 {wants}: ranks 1, 2 ended without it"
    assert never_ending(found, [0, 1]) is None, "rank 1 is in no call"
    assert never_ending(calls((0, 1), waits, waits), [0, 1]) is None, "they meet"


def test_where_ranks_parted_before_a_call_that_some_lack():
    waits = [call(), call(line=4), call(line=5, pending=True)]
    found = calls((0, 1), waits, [call(), call(line=6)], first=7)
    assert never_ending(found, [0]).endswith(
        "rank 1 ended without it; they part at call 2 of this test: "
        "t.py:4 (rank 0), t.py:6 (rank 1)"
    )
    assert "they part at call 2" in called_by_some(found)


def test_two_ranks_that_wait_for_each_other_in_two_groups():
    one = calls((0, 1), [call(line=3, pending=True)], [], name="1", label="dp")
    two = calls((0, 1), [], [call("broadcast", line=5, pending=True)], name="2", label="tp")
    both = {rank: {**one[rank], **two[rank]} for rank in (0, 1)}
    assert never_ending(both, [0, 1]) == (
        "rank 0 waits in all_reduce of float32[4] at t.py:3 on dp: "
        "rank 1 waits in broadcast of float32[4] at t.py:5"
    )


def test_a_rank_that_has_not_answered_to_the_end_is_missing():
    whole = json.dumps({"0": [WORLD, [0, 1], 1, 1, [[1, *call()[:2], [4], 4, "t.py:1", True]]]})
    found = read_calls({0: whole, 1: whole[:-1], 2: ""})
    assert list(found) == [0]
    assert found[0]["0"].calls == {1: Call("all_reduce", "float32", [4], 4, "t.py:1", True)}
    assert str(Call("barrier", "", [], 0, "t.py:1", True)) == "barrier at t.py:1"


@pytest.mark.parametrize("main", [1, 2, 7])
def test_the_stack_of_the_main_thread_comes_first(main):
    """Whatever its number; that of the thread that answers is left out."""
    frame = sys._getframe()
    text = stacks_text(dict.fromkeys((1, 2, 5, 7), frame), main, own=5)
    heads = [part.partition("\n")[0] for part in text.split("\n\n")]
    assert heads == ["Stack (most recent call first):", "Another thread:", "Another thread:"]
    first = main_thread(text).splitlines()[1]
    assert first.startswith(f'  File "{__file__}", line ')
    assert first.endswith(f" in {frame.f_code.co_name}")
