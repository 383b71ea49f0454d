"""Process groups of all ranks in goldens: they divide the ranks, and the golden lists all
of them.
"""

import re

import pytest

from pytest_gtrainer.golden.compare import judge
from pytest_gtrainer.golden.naming import Claim, disagreement, with_groups_of_all_ranks
from pytest_gtrainer.graphtext import header
from pytest_gtrainer.testing import run_project
from tests.golden.conftest import QUICK

TEXT = "# gtrainer graph v2\n# world: ranks, 4 ranks\n{}if out:\n  yield 1\n"


def claims(*of_symbols: tuple[str, list[object]], indent: str = "") -> dict[int, Claim]:
    """Return the claims of ranks: for each symbol the ranks that each rank's text has for it."""
    claimed = {}
    for rank in range(len(of_symbols[0][1])):
        lines = [f"{indent}{symbol} = group({groups[rank]})\n" for symbol, groups in of_symbols]
        claimed[rank] = Claim("", "golden/a.fxgraph", "graph", TEXT.format("".join(lines)))
    return claimed


ALL = ("dp", ["range(0, 4)"] * 4)
ALL_OF_SIX = ("dp", ["range(0, 6)"] * 6)
PAIRS = ("tp", ["range(0, 2)", "range(0, 2)", "range(2, 4)", "range(2, 4)"])
STRIDED = ("dp", ["range(0, 4, 2)", "range(1, 5, 2)", "range(0, 4, 2)", "range(1, 5, 2)"])
WRONG = {
    "paired with 1 for 2": (
        ["[0, 1]", "[0, 1]", "[2, 3]", "[1, 3]"],
        r"rank 2 has \[2, 3\], .* rank 3 has \[1, 3\]",
    ),
    "in no group": (
        ["[0, 1]", "[0, 1]", "[0, 1]", "[0, 1]"],
        r"rank 2 has \[0, 1\], which does not hold rank 2",
    ),
    "other size": (
        ["[0, 1]", "[0, 1]", "[2, 3]", "[3]"],
        r"rank 2 has \[2, 3\], .* rank 3 has \[3\]",
    ),
    "other order": (
        ["[0, 1]", "[1, 0]", "[2, 3]", "[2, 3]"],
        r"rank 0 has \[0, 1\], .* rank 1 has \[1, 0\]",
    ),
    "beyond the world": (
        ["[0, 1]", "[0, 1]", "[2, 7]", "[3]"],
        r"its member rank 7 names no group",
    ),
    "twice": (
        ["[0, 1]", "[0, 1]", "[2, 2]", "[3]"],
        r"rank 2 has \[2, 2\], which holds a rank twice",
    ),
}


@pytest.mark.parametrize(("groups", "words"), WRONG.values(), ids=list(WRONG))
@pytest.mark.parametrize("before", [[], [ALL], [ALL, STRIDED]], ids=["first", "second", "third"])
@pytest.mark.parametrize("indent", ["", "  "], ids=["of the graph", "of a graph inside"])
def test_groups_that_do_not_divide_the_ranks_are_a_failure(groups, words, before, indent):
    """V4: rank 3 paired with rank 1 for 2 passed. Also of the second group, and of a graph inside
    the graph.
    """
    claimed = claims(*before, ("tp", groups), indent=indent)
    found = disagreement({rank: [claim] for rank, claim in claimed.items()})
    assert found is not None, f"{groups} pass for groups that divide the ranks"
    text, shown = found
    assert re.match(f"ranks do not agree on the process group tp of the golden: .*{words}", text)
    assert sorted(shown) == [0, 1, 2, 3]


@pytest.mark.parametrize("place", range(3))
def test_groups_of_each_golden_of_a_test_are_compared(place):
    """V4: of the second and third one, too; the failure names the golden."""
    good, bad = claims(PAIRS), claims(("tp", WRONG["other order"][0]))
    of_ranks = {}
    for rank in good:
        own = [bad[rank] if nth == place else good[rank] for nth in range(3)]
        of_ranks[rank] = [each._replace(name=f"g{nth}") for nth, each in enumerate(own)]
    text, shown = disagreement(of_ranks)
    assert text.startswith(f"ranks do not agree on the process group tp of golden 'g{place}': ")
    assert {claim.name for claim in shown.values()} == {f"g{place}"}


UNTOLD = {
    "regular": ((ALL, PAIRS, STRIDED), None),
    "uneven": ((("ep", ["range(0, 3)"] * 3 + ["[3]"]),), "ep = [0, 1, 2] [3]"),
    "all reversed": ((("dp", ["[3, 2, 1, 0]"] * 4),), "dp = [3, 2, 1, 0]"),
    "not a mesh's": (
        (("tp", ["[0, 1]"] * 2 + ["[2, 4]", "[3, 5]"] * 2),),
        "tp = [0, 1] [2, 4] [3, 5]",
    ),
    "a second one": ((ALL, ("ep", ["[0, 3]", "[1, 2]", "[1, 2]", "[0, 3]"])), "ep = [0, 3] [1, 2]"),
    "of no ranks": ((("lost", ["None"] * 4),), None),
}


@pytest.mark.parametrize(("groups", "shown"), UNTOLD.values(), ids=list(UNTOLD))
def test_a_golden_shows_the_groups_of_all_ranks_where_the_first_does_not_tell_them(groups, shown):
    """V4: those of a mesh's dimension follow from the first; such goldens keep their bytes."""
    claimed = claims(*groups)
    assert disagreement({rank: [claim] for rank, claim in claimed.items()}) is None
    text = with_groups_of_all_ranks(claimed).text
    assert header.read(text).get("groups") == shown
    assert header.body(text) == header.body(claimed[0].text)
    if shown is None:
        assert text == claimed[0].text


def test_a_golden_with_other_groups_differs():
    """V4: the first rank's group is the same, and so is the text below the header."""
    straight = with_groups_of_all_ranks(
        claims(("tp", ["[0, 1]"] * 2 + ["[2, 4]", "[3, 5]"] * 2))
    ).text
    crossed = with_groups_of_all_ranks(
        claims(("tp", ["[0, 1]"] * 2 + ["[2, 5]", "[3, 4]", "[3, 4]", "[2, 5]"]))
    ).text
    found = with_groups_of_all_ranks(
        claims(("tp", ["[0, 1]"] * 2 + ["[2, 3]"] * 2 + ["[4, 5]"] * 2))
    ).text
    assert judge("graph", straight, straight).outcome == "equal"
    assert "the golden has tp = [0, 1] [2, 4] [3, 5], obtained tp = [0, 1] [2, 5] [3, 4]" in (
        judge("graph", straight, crossed).reasons
    )
    assert (
        "the golden has those that follow from the first rank's group, obtained tp = [0, 1] "
        "[2, 4] [3, 5]" in (judge("graph", found, straight).reasons)
    )


def test_every_group_that_the_first_rank_does_not_tell_is_in_the_header():
    """The second as well as the first, in the order of the text."""
    pairs = "[0, 1]", "[0, 1]", *["[2, 4]", "[3, 5]"] * 2
    triples = "[0, 2, 3]", "[1, 4, 5]", "[0, 2, 3]", "[0, 2, 3]", "[1, 4, 5]", "[1, 4, 5]"
    text = with_groups_of_all_ranks(claims(("tp", pairs), ALL_OF_SIX, ("ep", triples))).text
    assert header.read(text)["groups"] == "tp = [0, 1] [2, 4] [3, 5]; ep = [0, 2, 3] [1, 4, 5]"
    other = with_groups_of_all_ranks(claims(("tp", pairs), ALL_OF_SIX, ("ep", pairs))).text
    said = judge("graph", text, other).reasons
    assert "ep = [0, 2, 3] [1, 4, 5], obtained" in said
    assert said.endswith("ep = [0, 1] [2, 4] [3, 5]")


RANKS = """
import pytest, torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx

PARTITIONS = {"right": [[0, 3], [1, 2], [1, 2], [0, 3]], "wrong": [[0, 1], [0, 1], [2, 3], [1, 3]]}

@pytest.mark.gt_world("ranks", size=4)
@pytest.mark.parametrize("name", PARTITIONS)
def test_group(gt_golden, gt_world, name):
    made = {tuple(ranks): dist.new_group(ranks) for ranks in PARTITIONS[name]}
    own = made[tuple(PARTITIONS[name][gt_world.rank])]
    def step(x):
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", own))
    gt_golden.check(make_fx(step, tracing_mode="fake")(torch.ones(2)))
"""


@pytest.mark.second_tier
def test_on_real_ranks(tmp_path):
    """V4: the golden that is written shows both pairs; the wrong one is not written."""
    run = run_project(tmp_path, *QUICK, "--gt-update-goldens", files={"test_groups.py": RANKS})
    assert run["test_group[right]"].outcome == "passed"
    assert run["test_group[wrong]"].outcome == "failed"
    assert "rank 2 has [2, 3], and its member rank 3 has [1, 3]" in run["test_group[wrong]"].message
    [golden] = (tmp_path / "golden").rglob("*.fxgraph")
    assert header.read(golden.read_text())["groups"].endswith("[0, 3] [1, 2]")


@pytest.mark.parametrize(
    ("golden", "obtained"), [("a = [0] [1]", "a = [1] [0]"), ("", "a = [0] [1]"), ("a = [0]", "")]
)
def test_other_groups_of_other_ranks_are_named_on_the_side_that_has_them(golden, obtained):
    texts = []
    for groups in (golden, obtained):
        field = f"# groups: {groups}\n" if groups else ""
        texts.append(f"# gtrainer graph v2\n{field}if out:\n  yield 1\n")
    default = "those that follow from the first rank's group"
    found = judge("graph", *texts)
    assert (found.outcome, found.reasons) == (
        "different",
        f"process groups of all ranks: the golden has {golden or default}, "
        f"obtained {obtained or default}",
    )
