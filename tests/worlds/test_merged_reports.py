"""Reports of a test are made from those of its ranks: headline, a line for each rank, agreement."""

import itertools
import re

import pytest

from pytest_gtrainer.ranks.inside.session import summary_of
from pytest_gtrainer.ranks.merge import (
    PHASES,
    STRICT,
    MergedTest,
    _properties_of,
    _xfail_of,
    result_of,
)
from pytest_gtrainer.ranks.objections import Xfail, controls_that_never_differ
from pytest_gtrainer.ranks.watch import Incident, RanksOutcome
from pytest_gtrainer.ranks.wire import GroupState, ItemDone, Raised
from pytest_gtrainer.testing import run_project
from tests.golden.conftest import QUICK


def report(when="call", outcome="passed", longrepr=None, sections=(), duration=0.0, **more):
    made = pytest.TestReport(
        "t.py::test", ("t.py", 0, "test"), {}, outcome, longrepr, when, list(sections), duration
    )
    for name, value in more.items():
        setattr(made, name, value)
    return made


def failed(words, when="call"):
    try:
        raise ValueError(words)
    except ValueError:
        return report(when, "failed", pytest.ExceptionInfo.from_current().getrepr())


PASSED = report()
SKIPPED = report(outcome="skipped", longrepr=("t.py", 3, "Skipped: not here"))
XFAILED = report(outcome="skipped", wasxfail="known")
XPASSED = report(outcome="failed", longrepr="[XPASS(strict)] known")


def merged(request, *calls, raised=None, setups=None, teardowns=None, reports=None, **outcome):
    """The reports of ranks with these call phases, by phase; ``raised`` by rank: time, words, and
    more.
    """
    by_rank = reports
    if by_rank is None:
        by_rank = {}
        for rank, call in reversed(
            list(enumerate(calls))
        ):  # they come as the ranks end, not in their order
            setup, teardown = (each or {} for each in (setups, teardowns))
            phases = setup.get(rank, report("setup")), call, teardown.get(rank, report("teardown"))
            by_rank[rank] = {
                phase: report
                for phase, report in zip(PHASES, phases, strict=True)
                if report is not None
            }
    exceptions = {
        rank: Raised(
            time, f"ValueError: {words}", False, *(more or (None, None)), place=((words, 1),)
        )
        for rank, (time, words, *more) in (raised or {}).items()
    }
    outcome = RanksOutcome(max(len(by_rank), 1), raised=exceptions, **outcome)
    return {report.when: report for report in MergedTest(request.node, outcome, by_rank).reports()}


def others(report):
    """The section that says of each rank what it did."""
    return (
        str(report.longrepr)
        .partition("ranks ---")[2]
        .strip(" -\n")
        .partition("\n---")[0]
        .splitlines()
    )


def test_what_all_ranks_passed_is_passed_with_the_output_of_each(request):
    calls = [
        report(sections=[("Captured stdout call", text)], duration=spent)
        for text, spent in (("a", 1), ("b", 3))
    ]
    found = merged(request, *calls, report(sections=[("Captured stdout call", "a")], duration=2))
    assert [(phase, each.outcome) for phase, each in found.items()] == [
        (phase, "passed") for phase in PHASES
    ]
    assert found["call"].duration == 3, "that of the slowest rank"
    titles = [("Captured stdout call [ranks 0, 2]", "a"), ("Captured stdout call [rank 1]", "b")]
    assert found["call"].sections == titles, "equal output once, with its ranks"


def test_the_first_failure_in_time_is_the_headline(request):
    """T1: not that of the lowest rank; each of the others is a line."""
    found = merged(
        request,
        failed("late"),
        failed("first"),
        PASSED,
        raised={0: (9.0, "late"), 1: (5.0, "first")},
    )
    assert found["call"].longrepr.reprcrash.message == "[rank 1] ValueError: first"
    assert others(found["call"]) == [
        "rank 1: ValueError: first",
        "rank 0: ValueError: late",
        "rank 2: passed",
    ]
    assert [found[phase].outcome for phase in ("setup", "teardown")] == ["passed", "passed"]


def test_of_ranks_that_fail_alike_within_moments_the_lowest_is_told(request):
    """Chance decides which of them was first, so the next run would name another one."""
    raised = {0: (5.1, "alike"), 1: (5.0, "alike"), 2: (5.05, "alike")}
    found = merged(request, *[failed("alike")] * 3, raised=raised)
    assert found["call"].longrepr.reprcrash.message.startswith("[rank 0]")
    assert others(found["call"]) == ["ranks 0-2: ValueError: alike"]


def test_a_rank_that_only_lost_its_peers_is_never_the_headline(request):
    """It raised in the collective after another one had left it, and says where it waited."""
    found = merged(
        request,
        failed("connection closed"),
        failed("cause"),
        failed("a fault of its own"),
        unblocked_at=5.5,
        raised={
            0: (6.0, "connection closed", "barrier", None),
            1: (5.0, "cause"),
            2: (6.5, "a fault of its own"),
        },
    )
    assert found["call"].longrepr.reprcrash.message == "[rank 1] ValueError: cause"
    lines = [
        "rank 1: ValueError: cause",
        "rank 0: waited in barrier",
        "rank 2: ValueError: a fault of its own",
    ]
    assert others(found["call"]) == lines
    before = merged(
        request,
        failed("connection"),
        failed("cause"),
        unblocked_at=5.5,
        raised={0: (4.0, "connection", "barrier", None), 1: (5.0, "cause")},
    )
    assert before["call"].longrepr.reprcrash.message.startswith("[rank 0]"), (
        "it raised before anybody was unblocked"
    )


@pytest.mark.parametrize(
    ("died", "unblocked", "headline"),
    [
        (4.1, None, "rank 1 was killed"),
        (4.1, 4.3, "rank 1 was killed"),
        (9.0, 4.3, "[rank 0] ValueError: sizes"),
    ],
    ids=["and nobody was let go", "before the others were let go", "after that"],
)
def test_a_rank_is_no_consequence_of_a_death_that_came_later(request, died, unblocked, headline):
    """It had raised in a collective by a fault of its own.

    A death that comes within moments may be what it noticed, before the parent did.
    """
    found = merged(
        request,
        failed("sizes"),
        None,
        failed("connection closed"),
        raised={0: (4.0, "sizes", "all_reduce", None), 2: (9.1, "closed", "barrier", None)},
        incidents=[Incident(died, 1, "rank 1 was killed by SIGSEGV")],
        dead={1},
        unblocked_at=unblocked,
    )
    shown = found["call"].longrepr
    message = shown.reprcrash.message if hasattr(shown, "reprcrash") else str(shown)
    assert message.startswith(headline)


def test_where_exceptions_say_where_the_fault_lies_the_smallest_place_is_the_headline(request):
    """L4: the first step and rank that differ, whoever noticed first.

    An exception that says nothing stands behind.
    """
    raised = {0: (1.0, "at 9", None, (9, 0)), 1: (2.0, "at 7", None, (7, 2)), 2: (3.0, "nowhere")}
    found = merged(request, failed("at 9"), failed("at 7"), failed("nowhere"), raised=raised)
    assert found["call"].longrepr.reprcrash.message == "[rank 1] ValueError: at 7"


def test_what_befell_a_rank_from_outside_counts_by_its_time(request):
    """T2: a death is reported by rank and signal, unless another rank had failed before."""
    killed = Incident(
        3.0, 2, "rank 2 was killed by SIGKILL", (("last output of rank 2", "the last words"),)
    )
    two = {rank: {"call": each} for rank, each in enumerate((failed("own"), PASSED))}
    early = merged(request, reports=two, raised={0: (4.0, "own")}, incidents=[killed], dead=set())
    assert str(early["call"].longrepr).startswith("rank 2 was killed by SIGKILL\n")
    assert others(early["call"]) == [
        "rank 2: was killed by SIGKILL",
        "rank 0: ValueError: own",
        "rank 1: passed",
    ]
    assert "--- last output of rank 2 [rank 2] ---\nthe last words" in str(early["call"].longrepr)
    two = {rank: {"call": each} for rank, each in enumerate((failed("own"), PASSED))}
    late = merged(request, reports=two, raised={0: (2.0, "own")}, incidents=[killed])
    assert late["call"].longrepr.reprcrash.message == "[rank 0] ValueError: own"
    lost = {0: {"call": failed("connection closed")}}
    noticed = merged(
        request,
        reports=lost,
        raised={0: (2.5, "connection closed", "barrier", None)},
        incidents=[killed],
        dead={2},
    )
    assert str(noticed["call"].longrepr).startswith("rank 2 was killed by SIGKILL"), (
        "its peer heard of it before us"
    )
    assert others(noticed["call"]) == ["rank 2: was killed by SIGKILL", "rank 0: waited in barrier"]
    stuck = Incident(
        1.0, 1, "rank 1 is stuck in a collective that another has left", is_consequence=True
    )
    cause = merged(
        request, reports={0: {"call": failed("own")}}, raised={0: (2.0, "own")}, incidents=[stuck]
    )
    assert cause["call"].longrepr.reprcrash.message == "[rank 0] ValueError: own", (
        "who is stuck for it is no cause"
    )
    alone = merged(request, reports={}, incidents=[killed])
    assert str(alone["call"].longrepr).startswith("rank 2 was killed by SIGKILL")
    assert "no rank has given a report" in str(merged(request, reports={})["call"].longrepr)


@pytest.mark.parametrize(
    ("calls", "outcome", "words"),
    [
        ((SKIPPED, SKIPPED), "skipped", "Skipped: not here"),
        (
            (PASSED, SKIPPED),
            "failed",
            "the ranks do not agree: passed (rank 0), skipped: not here (rank 1)",
        ),
        ((SKIPPED, SKIPPED, PASSED), "failed", "skipped: not here (ranks 0, 1), passed (rank 2)"),
        (
            (XPASSED, SKIPPED),
            "failed",
            f"the ranks do not agree: {STRICT} (rank 0), skipped: not here (rank 1)",
        ),
        ((PASSED, XPASSED), "failed", "[XPASS(strict)] known"),
        ((PASSED, XFAILED), "skipped", "known"),
        ((XFAILED, XPASSED), "skipped", "known"),
        (
            (SKIPPED, XFAILED),
            "failed",
            "the ranks do not agree: skipped: not here (rank 0), xfailed (rank 1)",
        ),
        ((XFAILED, XFAILED, SKIPPED), "failed", "xfailed (ranks 0, 1), skipped: not here (rank 2)"),
        ((XFAILED, PASSED, SKIPPED), "failed", "the ranks do not agree: "),
        ((XFAILED, XFAILED), "skipped", "known"),
    ],
    ids=[
        "all skip",
        "one skips",
        "one does not",
        "strict beside a skip",
        "one passes against strict",
        "one xfails",
        "one xfails beside strict",
        "one skips and one xfails",
        "the last skips",
        "all three",
        "all xfail",
    ],
)
def test_who_must_agree(request, calls, outcome, words):
    """T4: a skip is that of all ranks; one expected failure is enough; strict passes fail."""
    report = merged(request, *calls)["call"]
    assert (report.outcome, words in f"{report.longrepr} {getattr(report, 'wasxfail', '')}") == (
        outcome,
        True,
    ), report.longrepr


def test_one_result_a_rank():
    """Failed wins over all; passed against a strict xfail only if nothing else has failed."""
    strict, broken = (
        {"call": XPASSED},
        {"call": XPASSED, "teardown": failed("teardown", "teardown")},
    )
    assert [
        result_of(each)
        for each in (strict, broken, {"call": XFAILED}, {"call": SKIPPED}, {"call": PASSED})
    ] == [
        STRICT,
        "failed",
        "xfailed",
        "skipped",
        "passed",
    ]
    assert result_of({"setup": SKIPPED, "teardown": failed("t", "teardown")}) == "failed"


def test_of_all_phases_the_worst_is_the_result():
    """Failed, a strict xfail that passed, the first skip of either kind, then xpassed."""
    kinds = {
        "failed": failed("own"),
        STRICT: XPASSED,
        "xfailed": XFAILED,
        "skipped": SKIPPED,
        "xpassed": report(wasxfail="known"),
        "passed": PASSED,
    }
    for results in itertools.product(kinds, repeat=3):
        reports = {phase: kinds[result] for phase, result in zip(PHASES, results, strict=True)}
        skips = [each for each in results if each in ("xfailed", "skipped")]
        order = ["failed", STRICT, *skips[:1], "xpassed", "passed"]
        expected = next(each for each in order if each in results)
        assert result_of(reports) == expected, results
    assert result_of({}) == "passed"


def test_a_failure_of_a_setup_leaves_no_call_and_one_of_a_teardown_stands_beside(request):
    setup = merged(
        request,
        None,
        PASSED,
        setups={0: failed("no world", "setup")},
        raised={0: (1.0, "no world")},
    )
    assert {phase: report.outcome for phase, report in setup.items()} == {
        "setup": "failed",
        "teardown": "passed",
    }
    both = merged(
        request,
        failed("in the call"),
        PASSED,
        teardowns={1: failed("behind it", "teardown")},
        raised={0: (1.0, "in the call"), 1: (2.0, "behind it")},
    )
    assert [both[phase].outcome for phase in PHASES] == ["passed", "failed", "failed"]
    assert both["teardown"].longrepr.reprcrash.message == "[rank 1] ValueError: behind it"
    behind = merged(
        request,
        PASSED,
        PASSED,
        teardowns={1: failed("behind", "teardown")},
        raised={1: (1.0, "behind")},
    )
    assert [behind[phase].outcome for phase in PHASES] == ["passed", "passed", "failed"]


SAME = (
    "the control run is equal on all ranks: this check cannot fail; the mistake changes no bit here"
)


def control(equal, what=""):
    return {"kind": "control", "equal": equal, "what": what}


def only_on(ranks):
    elsewhere = f"on {ranks}, and no other rank made a control of this name (`what`)"
    return SAME.replace("on all ranks", elsewhere)


A_EQUAL, A_DIFFERS, B_EQUAL, B_DIFFERS = (
    control(equal, what) for what in "AB" for equal in (True, False)
)

CONTROLS = {
    "nowhere": ([[control(True)], [control(True)]], [SAME]),
    "on rank 1": ([[control(True)], [control(False)]], []),
    "on rank 0": ([[control(False)], [control(True)]], []),
    "the second nowhere": (
        [[control(False), control(True, "swapped")], [control(True), control(True, "swapped")]],
        [f"swapped: {SAME}"],
    ),
    "rank 1 compares once more": (
        [[control(False)], [control(True), control(True, "only here")]],
        [f"only here: {only_on('rank 1')}"],
    ),
    "no control": ([[{"kind": "verdict", "equal": True}], []], []),
    "other controls on other ranks": ([[A_EQUAL], [B_DIFFERS]], [f"A: {only_on('rank 0')}"]),
    "the first on one rank alone": (
        [[A_EQUAL, B_DIFFERS], [B_DIFFERS]],
        [f"A: {only_on('rank 0')}"],
    ),
    "the last on one rank alone": ([[B_DIFFERS, A_EQUAL], [B_EQUAL]], [f"A: {only_on('rank 0')}"]),
    "on two of three ranks": ([[B_DIFFERS], [A_EQUAL], [A_EQUAL]], [f"A: {only_on('ranks 1, 2')}"]),
    "in another order": ([[A_EQUAL, B_DIFFERS], [B_EQUAL, A_DIFFERS]], []),
    "on one rank alone, where it differs": ([[A_DIFFERS], []], []),
    "twice of one name": ([[A_DIFFERS, A_EQUAL], [A_EQUAL, A_EQUAL]], [f"A: {SAME}"]),
    "twice on rank 0, once on rank 1": ([[A_EQUAL, A_DIFFERS], [A_EQUAL]], [f"A: {SAME}"]),
}


@pytest.mark.parametrize("case", CONTROLS)
def test_a_control_has_to_differ_on_some_rank(case):
    """L5: the n-th control of a name is one on all ranks; one that is equal alone is no failure."""
    sent, complaints = CONTROLS[case]
    assert list(controls_that_never_differ(dict(enumerate(sent)))) == complaints


def test_a_long_summary_ends_at_a_word_and_says_that_it_was_cut():
    summary = summary_of(ValueError("take sizes that ranks do not divide, " * 20))
    assert summary.startswith("ValueError: take sizes")
    assert re.search(r"\w,? …$", summary)
    assert len(summary) <= 300
    assert summary_of(ValueError("short")) == "ValueError: short"


@pytest.mark.parametrize("longrepr", [None, "", " \n"])
def test_a_failure_without_a_text_is_reported(request, longrepr):
    """A plugin may take the text of a failure away."""
    found = merged(request, report(outcome="failed", longrepr=longrepr), PASSED)
    assert [each.outcome for each in found.values()] == ["passed", "failed", "passed"]
    assert "rank 0: failed in its call, without a text" in others(found["call"])


def test_reports_may_be_asked_for_again(request):
    by_rank = {rank: {"call": failed(f"on {rank}")} for rank in range(2)}
    test = MergedTest(request.node, RanksOutcome(2), by_rank)
    texts = [[str(each.longrepr) for each in test.reports()] for _ in range(2)]
    assert texts[0] == texts[1]
    assert test.reports()[1].longrepr.reprcrash.message == "[rank 0] ValueError: on 0"


def of_messages(*states):
    answers = {}
    for rank, messages in enumerate(states):
        state = GroupState(True, 1, messages=messages)
        answers[rank] = ItemDone((), (), None, state)
    return RanksOutcome(len(states), answers).disagreement()


def test_messages_that_nobody_receives_are_a_disagreement():
    """With gloo the default group lives on: the next test would receive them."""
    assert of_messages({"all ranks": 1}, {"all ranks": -1}, {"all ranks": 0}) is None
    assert of_messages({"all ranks": 1}, {}, {}) == (
        "the ranks sent 1 message more on all ranks than they received: give every send its recv"
    )
    assert of_messages({"all ranks": 0, "ranks 1, 2": -1}, {"ranks 1, 2": -1}) == (
        "the ranks sent 2 messages fewer on ranks 1, 2 than they received: give every send its recv"
    )


MESSAGES = """
import pytest, torch
import torch.distributed as dist

pytestmark = pytest.mark.gt_world("ranks", size=2)

def test_nobody_receives():
    dist.barrier()  # gloo connects at first use: isend alone may wait for the other rank
    if dist.get_rank() == 0:
        dist.isend(torch.ones(1), 1)

def test_nobody_sends():
    if dist.get_rank() == 1:
        dist.irecv(torch.ones(1), 0)

def test_in_a_group():
    group = dist.new_group([0, 1])
    dist.barrier(group)  # as above
    if dist.get_rank() == 0:
        dist.isend(torch.ones(1), 1, group=group)

def test_exchange():
    peer = 1 - dist.get_rank()
    got = torch.zeros(1)
    ops = [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(got)
    assert got == 1
"""


@pytest.mark.second_tier
def test_a_message_that_nobody_receives_fails_the_test(tmp_path):
    files = {"test_it.py": MESSAGES, "pytest.ini": "[pytest]\n"}
    options = ("--gt-gpus=2", "--gt-device=cpu", "--gt-timeout=100")
    run = run_project(tmp_path, *QUICK, *options, files=files)
    assert run["test_exchange"].outcome == "passed", run.output
    for name, words in (
        ("test_nobody_receives", "sent 1 message more on all ranks"),
        ("test_nobody_sends", "sent 1 message fewer on all ranks"),
        ("test_in_a_group", "sent 1 message more on all ranks (group 2 of these)"),
    ):
        assert run[name].outcome == "failed"
        assert words in run[name].message


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({}, []),
        ({0: [], 1: []}, []),
        ({0: [("a", 1)], 1: [("a", 1)]}, [("a", 1)]),
        ({1: [("a", 1)], 2: [("a", 1)]}, [("a", 1)]),
        ({0: [("a", 1), ("a", 1)], 1: [("a", 1)]}, [("a", 1), ("a", 1)]),
        ({0: [("a", 0)], 1: [("a", 1)], 2: [("a", 1)]}, [("a", 0), ("a (ranks 1, 2)", "1")]),
        ({0: [], 1: [], 2: [("b", 5)]}, [("b (rank 2)", "5")]),
        ({0: [("a", 1)], 1: [["a", 1], ["b", 2]]}, [("a", 1), ("b (rank 1)", "2")]),
    ],
)
def test_what_ranks_record_for_junit_is_that_of_the_first_and_what_others_have_else(
    recorded, expected
):
    """The last phase has all; a rank that was lost has fewer phases."""
    by_rank = {}
    for rank, properties in recorded.items():
        by_rank[rank] = {
            "setup": report("setup", user_properties=properties[:1]),
            "call": report(user_properties=properties),
        }
        if rank < 2:
            by_rank[rank]["teardown"] = report("teardown", user_properties=properties)
    assert _properties_of(by_rank) == expected


def test_a_mark_expects_what_it_expects_on_all_ranks():
    """The mark of a rank may have a condition, and errors of its own."""
    pattern = ("a", 0)
    marks = [("known", ["control", "gtrainer-goldens"], [pattern]), ("other", ["control"], [])]
    by_rank = [[report(gt_xfail=mark)] for mark in marks]
    assert _xfail_of(by_rank) == Xfail("known", ["control"], [pattern])
    assert _xfail_of([*by_rank, [report()]]) is None
    assert _xfail_of([[report(gt_xfail=marks[1]), report()]]) is None
    assert _xfail_of([]) is None


def test_each_of_several_subtests_of_one_name_is_reported(request):
    """The n-th on one rank is the n-th on the others."""
    texts = {0: ["a", "b", "c"], 1: ["a", "x", "c"]}
    subtests = {}
    for rank, of_rank in texts.items():
        subtests[rank] = [report(sections=[("Captured stdout call", text)]) for text in of_rank]
    by_rank = {rank: {phase: report(phase) for phase in PHASES} for rank in texts}
    parts = MergedTest(request.node, RanksOutcome(2), by_rank, subtests).subtest_reports()
    assert [sorted(text for _, text in each.sections) for each in parts] == [
        ["a"],
        ["b", "x"],
        ["c"],
    ]
