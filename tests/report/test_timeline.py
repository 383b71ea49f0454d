"""The schedule as a picture: what runs when under a cost model, on graphs written as text."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from pytest_gtrainer.graphtext import parse
from pytest_gtrainer.report import witness
from pytest_gtrainer.report.timeline import CostModel, Span, Timeline, flops_of, timeline

SLOW = CostModel(flops_per_second=1e6, bytes_per_second=4e6, link=1e6, overhead=0.0, latency=0.0)
"""A second of compute for 1,000,000 elements of fp32 (read and written: 2 s); a second on the wire
for 1 MB.
"""

TWO_GROUPS = """
fsdp = group(range(0, 2))
ep = group(range(0, 2))
if I:
  I[0]: f32[250000]
  I[1]: f32[250000]
if fwd:
  with _:
    all_reduce: f32[250000] = _c10d_functional.all_reduce(I[0], "sum", fsdp)
    all_reduce_1: f32[250000] = _c10d_functional.all_reduce(I[1], "sum", {second})
    sin: f32[250000] = aten.sin(I[0])
    wait_tensor: f32[250000] = _c10d_functional.wait_tensor(all_reduce)
    wait_tensor_1: f32[250000] = _c10d_functional.wait_tensor(all_reduce_1)
if out:
  out[0] = wait_tensor
  out[1] = wait_tensor_1
  out[2] = sin
"""


def spans(text, model=SLOW):
    return [
        (s.lane, s.kind, round(s.start, 6), round(s.duration, 6))
        for s in timeline(parse(text), model).spans
    ]


def test_collectives_of_one_group_queue_and_of_two_groups_do_not():
    """A ring all-reduce of 1 MB over two ranks puts 1 MB on the wire: 1 s; ``sin`` moves 2 MB: 0.5
    s.
    """
    assert spans(TWO_GROUPS.format(second="fsdp")) == [
        ("fsdp", "collective", 0.0, 1.0),
        ("fsdp", "collective", 1.0, 1.0),
        ("compute", "compute", 0.0, 0.5),
        ("compute", "exposed", 0.5, 0.5),
        ("compute", "exposed", 1.0, 1.0),
    ]
    assert spans(TWO_GROUPS.format(second="ep")) == [
        ("fsdp", "collective", 0.0, 1.0),
        ("ep", "collective", 0.0, 1.0),
        ("compute", "compute", 0.0, 0.5),
        ("compute", "exposed", 0.5, 0.5),
    ]


def test_only_communication_beside_compute_is_overlapped():
    """Not what another lane sends at the same time, nor what nothing waits for."""
    both = timeline(parse(TWO_GROUPS.format(second="ep")), SLOW)
    assert (both.exposed, both.overlapped, both.total("collective")) == (0.5, 1.0, 2.0)
    lines = TWO_GROUPS.format(second="fsdp").splitlines()
    never_waited = [line for line in lines if "wait" not in line and "out[2]" not in line]
    never_waited.append("  out[0] = sin\n  out[1] = all_reduce_1\n")
    alone = timeline(parse("\n".join(never_waited)), SLOW)
    assert (alone.exposed, alone.overlapped, alone.total("collective")) == (0.0, 0.5, 2.0)
    # The schedule ends with the last lane that ends, whether or not anything waits for it.
    assert (both.seconds, alone.seconds) == (1.0, 2.0)


def test_what_is_exposed_and_what_is_overlapped_add_up():
    measured = timeline(parse(TWO_GROUPS.format(second="fsdp")), SLOW)
    assert (measured.exposed, measured.overlapped, measured.total("collective")) == (1.5, 0.5, 2.0)
    assert measured.seconds == 2.0
    assert measured.lanes == ("compute", "fsdp")


def test_a_launch_moved_up_overlaps():
    """The same operators in another order: the difference is what a reordering pass is for."""
    late = TWO_GROUPS.format(second="ep").replace("    sin: f32[250000] = aten.sin(I[0])\n", "")
    late = late.replace("  with _:\n", "  with _:\n    sin: f32[250000] = aten.sin(I[0])\n")
    early, late = (timeline(parse(text), SLOW) for text in (TWO_GROUPS.format(second="ep"), late))
    assert (early.seconds, late.seconds) == (1.0, 1.5)
    assert (early.exposed, late.exposed) == (0.5, 1.0)


PRODUCT = """
if I:
  I[0]: f32[100, 200]
  I[1]: f32[200, 300]
if fwd:
  with _:
    mm: f32[100, 300] = aten.mm(I[0], I[1])
    view: f32[30000] = aten.view(mm, [30000])
if out:
  out[0] = view
"""


IN_PLACE = """
fsdp = group(range(0, 2))
if I:
  I[0]: f32[250000]
if fwd:
  with _:
    clone: f32[250000] = aten.clone(I[0])
    view: f32[500, 500] = aten.view(clone, [500, 500])
    all_reduce_: f32[250000] = _c10d_functional.all_reduce_({operand}, "sum", fsdp)
    {read}
if out:
  out[0] = {name}
"""


@pytest.mark.parametrize("operand", ["clone", "view"])
@pytest.mark.parametrize(
    "read",
    [
        "wait_tensor: f32[250000] = _c10d_functional.wait_tensor(all_reduce_)",
        "wait_tensor: f32[250000] = _c10d_functional.wait_tensor(clone)",
        "wait_tensor: f32[500, 500] = _c10d_functional.wait_tensor(view)",
        "sin: f32[250000] = aten.sin(clone)",
        "sin: f32[500, 500] = aten.sin(view)",
        "add_: f32[250000] = aten.add_.Tensor(clone, 1)",
    ],
)
def test_what_a_collective_in_place_writes_to_is_there_when_it_has_ended(operand, read):
    text = IN_PLACE.format(operand=operand, read=read, name=read.partition(":")[0])
    waited = [span for span in spans(text) if span[1] == "exposed"]
    assert waited == [("compute", "exposed", 0.5, 1.0)]


def test_what_a_collective_in_place_does_not_write_to_is_there_at_once():
    text = IN_PLACE.format(operand="clone", read="sin: f32[250000] = aten.sin(I[0])", name="sin")
    assert not [span for span in spans(text) if span[1] == "exposed"]


def test_products_cost_operations_and_views_nothing():
    """2 * 100 * 200 * 300 operations by torch's formula, at 1e6 a second."""
    gm = parse(PRODUCT)
    assert [flops_of(node) for node in gm.graph.nodes if node.op == "call_function"] == [
        12_000_000,
        0,
    ]
    assert spans(PRODUCT) == [("compute", "compute", 0.0, 12.0)]
    by_bytes = CostModel(flops_per_second=1e12, bytes_per_second=1e6, overhead=0.0)
    assert spans(PRODUCT, by_bytes) == [("compute", "compute", 0.0, 0.44)]  # 440,000 bytes


FOUR = (
    "fsdp = group(range(0, 4))\nif I:\n  I[0]: f32[{given}]\nif fwd:\n  with _:\n"
    "    it: f32[{got}] = {call}\n"
)
WHOLE, SHARD = 250_000, 62_500


@pytest.mark.parametrize(
    ("given", "got", "call", "seconds"),
    [
        (SHARD, WHOLE, "_c10d_functional.all_gather_into_tensor(I[0], 4, fsdp)", 0.75),
        (WHOLE, SHARD, '_c10d_functional.reduce_scatter_tensor(I[0], "sum", 4, fsdp)', 0.75),
        (
            WHOLE,
            WHOLE,
            "_c10d_functional.all_to_all_single(I[0], [62500] * 4, [62500] * 4, fsdp)",
            0.75,
        ),
        (WHOLE, WHOLE, '_c10d_functional.all_reduce(I[0], "sum", fsdp)', 1.5),
        (WHOLE, WHOLE, "_c10d_functional.broadcast(I[0], 0, fsdp)", 1.0),
    ],
    ids=["gather", "scatter", "exchange", "reduce", "broadcast"],
)
def test_what_a_rank_puts_on_the_wire(given, got, call, seconds):
    """A rank sends three quarters of 1 MB over four ranks, twice for an all-reduce, all of a
    broadcast; and the latency of each.
    """
    text = FOUR.format(
        given=given, got=got, call=call.replace("[62500] * 4", "[62500, 62500, 62500, 62500]")
    )
    assert spans(text) == [("fsdp", "collective", 0.0, seconds)]
    late = CostModel(link=1e6, latency=0.25)
    assert spans(text, late) == [("fsdp", "collective", 0.0, seconds + 0.25)]
    assert timeline(parse(text), SLOW).seconds == seconds, (
        "what nobody waits for takes its time all the same"
    )


def test_a_wait_for_one_output_of_a_coalesced_collective_waits_for_all_of_it():
    text = """
fsdp = group(range(0, 2))
if I:
  I[0]: f32[125000]
if fwd:
  with _:
    both: [f32[250000], f32[250000]] = _c10d_functional.all_gather_into_tensor_coalesced([I[0], I[0]], 2, fsdp)
    wait_tensor: f32[250000] = _c10d_functional.wait_tensor(both[1])
"""
    assert spans(text) == [("fsdp", "collective", 0.0, 1.0), ("compute", "exposed", 0.0, 1.0)]


def test_a_kernel_costs_its_overhead_and_a_view_does_not():
    measured = timeline(
        parse(PRODUCT), CostModel(flops_per_second=1e6, bytes_per_second=1e12, overhead=0.5)
    )
    assert [round(span.duration, 3) for span in measured.spans] == [12.5]


def test_a_collective_of_which_nothing_is_known_is_refused_by_name():
    """D17: it is never left out of the sum."""
    text = FOUR.format(
        given=4, got=4, call='_c10d_functional.all_reduce(I[0], "sum", fsdp)'
    ).replace("f32[4]", "_")
    with pytest.raises(
        ValueError,
        match=r"cannot say when it \(_c10d_functional\.all_reduce\) ends: what it moves",
    ):
        timeline(parse(text))


def test_neighbours_that_compute_for_one_module_are_one_in_the_picture():
    """Neighbours in other lanes, of other modules, or with a wait between them are not; nothing is
    lost or counted twice.
    """
    compute = [
        Span("compute", start, 1.0, label, "compute")
        for start, label in ((0.0, "a"), (1.0, "a"), (2.0, "b"), (4.0, "b"), (5.0, "b"))
    ]
    launches = [Span("fsdp", start, 1.0, "a", "collective") for start in (0.0, 1.0)]
    found = Timeline((launches[1], *compute[::-1], launches[0]), SLOW, 6.0)
    assert [(span.lane, span.start, span.duration, span.label) for span in found.merged()] == [
        ("compute", 0.0, 2.0, "a"),
        ("compute", 2.0, 1.0, "b"),
        ("compute", 4.0, 2.0, "b"),
        ("fsdp", 0.0, 1.0, "a"),
        ("fsdp", 1.0, 1.0, "a"),
    ]


TOKENS_OF_AN_EXPERT = """
if I:
  I[0]: f32[8, 4]
  I[1]: f32[4, 4]
  I[2]: b8[8]
if fwd:
  with _:
    nonzero: i64[u0, 1] = aten.nonzero(I[2])
    view: i64[u0] = aten.view(nonzero, [-1])
    index: f32[u0, 4] = aten.index_select(I[0], 0, view)
    mm: f32[u0, 4] = aten.mm(index, I[1])
if out:
  out[0] = mm
"""


def test_a_product_whose_size_only_the_run_knows_costs_no_operations():
    """It raised, and no model with experts had a timeline."""
    gm = parse(TOKENS_OF_AN_EXPERT)
    assert [flops_of(node) for node in gm.graph.nodes if node.name.startswith("mm")] == [0.0]
    assert timeline(gm, SLOW).seconds > 0


def test_a_chrome_trace_has_a_named_lane_for_each_group_and_says_its_model(tmp_path):
    measured = timeline(parse(TWO_GROUPS.format(second="ep")), SLOW)
    measured.save_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    lanes = {
        event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"
    }
    assert list(lanes.values()) == ["compute", "fsdp", "ep"]
    exposed = [event for event in trace["traceEvents"] if event.get("cat") == "exposed"]
    assert [(lanes[event["tid"]], event["ts"], event["dur"]) for event in exposed] == [
        ("compute", 5e5, 5e5)
    ]
    assert "link 1e+06 B/s" in trace["otherData"]["cost model"]


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a cost model's link is a rate above 0, not 0"):
        CostModel(link=0)


COUNTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6)


@hypothesis.given(COUNTS, COUNTS)
@hypothesis.settings(deadline=None)
def test_overlapped_seconds_are_those_in_which_both_lanes_are_busy(compute, communication):
    """Counted second by second; each lane is a row of pauses and spans."""
    spans, busy = [], []
    for lane, kind, rows in (
        ("compute", "compute", compute),
        ("fsdp", "collective", communication),
    ):
        now, seconds = 0, []
        for pause, duration in rows:
            spans.append(Span(lane, now + pause, duration, "x", kind))
            seconds += range(now + pause, now + pause + duration)
            now += pause + duration
        busy.append(seconds)
    made = Timeline(tuple(spans), SLOW, 100.0)
    assert made.overlapped == len(set(busy[0]) & set(busy[1]))
    assert made.total("compute") == len(busy[0])
    assert made.total("collective") == len(busy[1])


def test_spans_are_one_only_if_nothing_lies_between_them():
    def span(lane, start, duration, label="m", kind="compute"):
        return Span(lane, start, duration, label, kind)

    spans = [
        *(span("compute", 0, 1), span("compute", 1, 2), span("compute", 4, 1)),
        *(span("compute", 5, 1, "other"), span("compute", 6, 1, "other", "exposed")),
        *(span("ep", 0, 1, "m", "collective"), span("ep", 1, 1, "m", "collective")),
    ]
    made = Timeline(tuple(reversed(spans)), SLOW, 7.0)
    assert made.lanes == ("compute", "ep")
    assert made.merged() == [span("compute", 0, 3), *spans[2:]]


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_the_longest_spans_of_a_schedule_are_shown_and_the_others_counted(monkeypatch, most):
    monkeypatch.setattr(witness, "_MOST_SPANS", most)
    gm = parse(TWO_GROUPS.format(second="fsdp"))
    longest = sorted(timeline(gm).merged(), key=lambda span: -span.duration)[:most]
    found = witness.describe_schedule(gm, None)
    assert len(found["spans"]) == min(most, 5)
    assert found["left_out"] == 5 - len(found["spans"])
    shown = sorted((duration for _, _, duration, _, _ in found["spans"]), reverse=True)
    assert shown == [round(span.duration * 1e6, 3) for span in longest]
    places = [row[:2] for row in found["spans"]]
    assert places == sorted(places)
    assert (found["lanes"], found["model"]) == (["compute", "fsdp"], str(CostModel()))
    assert found["summary"] == timeline(gm).summary


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["flops_per_second", "bytes_per_second", "link"])
def test_a_rate_is_above_zero(name, value):
    with pytest.raises(ValueError, match=f"^a cost model's {name} is a rate above 0, not {value}$"):
        CostModel(**{name: value})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["overhead", "latency"])
def test_a_time_is_a_number_of_seconds(name, value):
    words = f"^a cost model's {name} is a number of seconds, 0 or more, not {value}$"
    with pytest.raises(ValueError, match=words):
        CostModel(**{name: value})
    CostModel(**{name: 0.0})


def test_a_model_in_words():
    assert str(CostModel(1e12, 2e9, 3e-6, 4e9, 5e-6)) == (
        "1e+12 flop/s, memory 2e+09 B/s, link 4e+09 B/s, 3 µs a kernel, 5 µs a collective"
    )
