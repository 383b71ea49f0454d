"""A witness records passes and records, and never stops a test."""

import base64
import itertools
import json
import zlib

import pytest
import torch

from pytest_gtrainer import (
    Record,
    apply_graph_passes,
    assert_bitwise_different,
    assert_bitwise_equal,
    bind_options,
    canonicalize_graph_pass,
    facts,
    graphtext,
    gt_compile,
    peak_memory,
)
from pytest_gtrainer.golden.compare import golden_difference
from pytest_gtrainer.graphtext.differences import lines
from pytest_gtrainer.graphtext.differences.lines import changed_lines
from pytest_gtrainer.report import witness
from pytest_gtrainer.report.witness import Witness, digest_rows

TEXT = """if I:
  I[0]: f32[4]
if fwd:
  with _:
    detach: f32[4] = aten.detach(I[0])
    neg: f32[4] = aten.neg(detach)
if out:
  out[0] = neg
"""


@pytest.fixture
def witnessed():
    """``witnessed(times)``: the facts of so many equal pipelines of one pass that changes the
    graph.
    """

    def run(times):
        with facts.collecting() as collected, facts.watching(Witness().watchers):
            for _ in range(times):
                apply_graph_passes(
                    graphtext.parse(TEXT), None, [bind_options(canonicalize_graph_pass)]
                )
        return collected

    return run


def kinds(events):
    return [fact["kind"] for fact in events]


def test_equal_graphs_of_a_test_are_sent_once(witnessed):
    found = witnessed(2)
    assert kinds(found) == ["graph_text", "memory", "graph_text", "memory", "pass", "pass"]
    assert [fact["pipeline"] for fact in found if fact["kind"] == "pass"] == [0, 1]


def test_of_many_pipelines_the_first_are_shown_and_the_rest_are_named(witnessed, monkeypatch):
    monkeypatch.setattr(witness, "_MOST_PIPELINES", 1)
    found = witnessed(3)
    assert kinds(found) == [
        "graph_text",
        "memory",
        "graph_text",
        "memory",
        "pass",
        "not_shown",
        "not_shown",
    ]
    assert "after the first 1" in found[-1]["what"]


def unpacked(fact):
    return json.loads(zlib.decompress(base64.b64decode(fact["packed"])))


def test_curves_of_passes_stand_by_their_graphs_and_those_that_a_test_asks_for_by_themselves(
    witnessed,
):
    collected = witnessed(1)
    keys = [fact["key"] for fact in collected if fact["kind"] == "graph_text"]
    assert [fact["key"] for fact in collected if fact["kind"] == "memory"] == keys
    assert not any(fact["asked"] for fact in collected if fact["kind"] == "memory")
    with facts.collecting() as collected, facts.watching(Witness().watchers):
        peak_memory(graphtext.parse(TEXT))
    (fact,) = collected
    assert fact["asked"]
    shown = unpacked(fact)
    assert (shown["at"], shown["curve"]) == (1, [16, 32, 32])
    assert shown["summary"].startswith("peak 32 B (32 bytes) at neg (aten.neg.default)")


def test_a_graph_whose_memory_nobody_can_tell_says_so_once():
    text = TEXT.replace("f32[4]", "f32[u0]")
    with facts.collecting() as collected, facts.watching(Witness().watchers):
        for _ in range(2):
            apply_graph_passes(graphtext.parse(text), None, [bind_options(canonicalize_graph_pass)])
    (why,) = [fact["why"] for fact in collected if fact["kind"] == "not_shown"]
    assert "known only when the graph runs: give the numbers of its sizes, sizes={'u0': 128}" in why


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return torch.relu(self.up(x))


def twice_and_half(graph):
    """A pass of a user on the forward, none on a graph without relu."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        with graph.inserting_after(node):
            times = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
        with graph.inserting_after(times):
            back = graph.call_function(torch.ops.aten.div.Tensor, (times, 2.0))
        times.meta, back.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(back, delete_user_cb=lambda user, times=times: user is not times)


def compiled(train=True):
    with (
        facts.collecting() as collected,
        facts.watching(Witness().watchers),
        gt_compile() as record,
    ):
        function = torch.compile(Model(), options={"post_grad_custom_post_pass": twice_and_half})
        result = function(torch.ones(2, 4))
        if train:
            result.sum().backward()
    assert "not_shown" not in kinds(collected)
    texts = {
        fact["key"]: zlib.decompress(base64.b64decode(fact["packed"])).decode()
        for fact in collected
        if "lines" in fact
    }
    return record, [fact for fact in collected if fact["kind"] == "pass"], texts


def test_stages_of_a_compiled_function_are_pipelines_with_the_passes_that_changed_them():
    record, passes, texts = compiled()
    begins = [fact for fact in passes if fact["fingerprint"] == "as recorded"]
    stages = ("dynamo", "joint", "forward", "backward")
    assert [(fact["pipeline"], fact["name"]) for fact in begins] == list(
        enumerate(f"{one} of 0/0" for one in stages)
    )
    for begin, stage in zip(begins, stages, strict=True):
        own = [fact for fact in passes if fact["pipeline"] == begin["pipeline"]]
        assert texts[begin["after"]] == graphtext.render(getattr(record, stage))
        if stage != "dynamo":
            assert texts[own[-1]["after"]] == graphtext.render(
                getattr(record, f"{stage}_after_passes")
            )
        assert all(one["after"] == other["before"] for one, other in itertools.pairwise(own))
    [ours] = [fact for fact in passes if fact["name"] == "twice_and_half"]
    assert (ours["pipeline"], ours["fingerprint"]) == (2, "post_grad_custom_post_pass")
    assert ours["seconds"] > 0
    assert any("aten.mul" in word for word in ours["words"])


def test_of_many_compiled_graphs_the_first_stages_are_shown_and_the_rest_are_named(monkeypatch):
    monkeypatch.setattr(witness, "_MOST_PIPELINES", 2)
    with facts.collecting() as collected, facts.watching(Witness().watchers), gt_compile():
        torch.compile(Model())(torch.ones(2, 4)).sum().backward()
    assert {fact["pipeline"] for fact in collected if fact["kind"] == "pass"} == {0, 1}
    assert [fact["what"] for fact in collected if fact["kind"] == "not_shown"] == [
        "stages after the first 2"
    ]


def test_what_was_recorded_before_an_error_is_shown():
    def fails():
        with gt_compile():
            torch.compile(torch.relu)(torch.ones(2))
            raise KeyError

    with (
        facts.collecting() as collected,
        facts.watching(Witness().watchers),
        pytest.raises(KeyError),
    ):
        fails()
    assert next(fact["name"] for fact in collected if fact["kind"] == "pass") == "dynamo of 0/0"


def test_without_a_report_nothing_is_rendered(monkeypatch):
    monkeypatch.setattr(graphtext, "render", None)
    with (
        facts.collecting() as collected,
        facts.watching(Witness(graphs=False).watchers),
        gt_compile(),
    ):
        torch.compile(torch.relu)(torch.ones(2))
    assert collected == []


def test_what_cannot_be_taken_down_is_told_and_stops_nothing(witnessed, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no text for this")

    monkeypatch.setattr(graphtext, "render", broken)
    (event,) = witnessed(1)
    assert (event["kind"], event["what"], event["why"]) == (
        "not_shown",
        "a pass",
        "RuntimeError: no text for this",
    )


def test_very_many_changes_end_in_one_that_holds_the_rest(monkeypatch):
    monkeypatch.setattr(lines, "_MOST_CHANGES", 1)
    old, new = "\n".join("abcdefg"), "\n".join("aXcYeZg")
    assert changed_lines(old, new) == [[1, 2, 1, 2], [3, 6, 3, 6]]


@pytest.mark.parametrize("most", [1, 9])
def test_every_tensor_that_differs_is_told_by_its_place_up_to_a_bound(monkeypatch, most):
    monkeypatch.setattr(witness, "_MOST_DIFFERING", most)
    ours, theirs = Record(), Record()
    for name in ("a", "b", "c"):
        ours.add(0, 0, "weight", name, torch.zeros(1))
        theirs.add(0, 0, "weight", name, torch.zeros(1) if name == "b" else torch.ones(1))
    with facts.collecting() as collected, facts.watching(Witness(graphs=False).watchers):
        assert_bitwise_different(ours, theirs)
        assert_bitwise_equal({"a": torch.zeros(1)}, {"a": torch.zeros(1)})
    fact, equal = [fact for fact in collected if fact["kind"] == "comparison"]
    assert (equal["differing"], equal["more"]) == ([], 0)
    assert fact["differing"] == [[0, 0, "weight", "a"], [0, 0, "weight", "c"]][:most]
    assert fact["more"] == 2 - len(fact["differing"])


def test_digests_stand_by_step_then_phase_then_rank():
    record = Record(world_size=2)
    for step, rank, phase in (
        (1, 0, "loss"),
        (0, 1, "weight"),
        (0, 0, "weight"),
        (0, 1, "loss"),
        (0, 0, "loss"),
    ):
        record.add(step, rank, phase, phase, torch.tensor(float(step)))
    places = [(0, 0, "loss"), (0, 1, "loss"), (0, 0, "weight"), (0, 1, "weight"), (1, 0, "loss")]
    assert [tuple(row[:3]) for row in digest_rows(record)] == places
    assert digest_rows(record)[0][3] == digest_rows(record)[1][3] != digest_rows(record)[4][3]


def test_texts_with_half_a_surrogate_pair_are_shown():
    """Paths have them, if their bytes are no UTF-8, and so do messages."""
    half, escaped = "a path \udc80", "a path \\udc80"
    assert facts.key_of(half) != facts.key_of(escaped)
    assert facts.unpacked(facts.packed(half)) == escaped
    (found,) = golden_difference("x.txt", half, escaped)
    assert len(set(found["keys"])) == 2
