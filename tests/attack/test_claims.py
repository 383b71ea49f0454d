"""What a pass claims besides values: memory, cost, the order of launches, idempotence."""

import pytest
import torch

from pytest_gtrainer import graphtext
from pytest_gtrainer.__main__ import main
from pytest_gtrainer.attack.claims import CLAIMS, broken_claim, check_claims

aten = torch.ops.aten

TWO_GATHERS = (
    "a: f32[4, 3] = _c10d_functional.all_gather_into_tensor(I.x, 2, world)",
    "b: f32[4, 3] = _c10d_functional.all_gather_into_tensor(I.y, 2, world)",
    "c: f32[4, 3] = _c10d_functional.wait_tensor(a)",
    "d: f32[4, 3] = _c10d_functional.wait_tensor(b)",
)


def parse(*lines, results=("c", "d")):
    text = ["# gtrainer graph v2", "world = group(range(0, 2))", "if I:"]
    text += ["  I.x: f32[2, 3]", "  I.y: f32[2, 3]", "if fwd:", "  with _:"]
    text += [f"    {line}" for line in lines]
    text += ["if out:", *(f"  yield fwd._.{result}" for result in results)]
    return graphtext.parse("\n".join(text) + "\n")


def nothing(gm, inputs):
    return gm


EXP = "c: f32[2, 3] = aten.exp(I.x)"
NEG = "d: f32[2, 3] = aten.neg(I.y)"
LARGE = "e: f32[64, 2, 3] = aten.expand(d, [64, 2, 3])"
COPY = "f: f32[64, 2, 3] = aten.clone(e)"
SUM = "g: f32[2, 3] = aten.sum.dim_IntList(f, [0])"
ALL_REDUCE = "a: f32[2, 3] = _c10d_functional.all_reduce({}, 'sum', world)"


@pytest.mark.gt_world("fake", size=2)
@pytest.mark.parametrize(
    ("claim", "before", "after", "words"),
    [
        ("memory", (EXP, NEG), (NEG, EXP), ""),
        ("memory", (EXP, NEG), (EXP, NEG, LARGE, COPY), "bytes are alive at"),
        ("memory", (EXP, NEG, LARGE, COPY), (EXP, NEG), ""),
        ("cost", (EXP, NEG), (NEG, EXP), ""),
        ("cost", (EXP, NEG), (EXP, NEG, "h: f32[2, 3] = aten.sin(I.x)"), "3 kernels; before"),
        ("cost", TWO_GATHERS[:2] + (EXP, NEG), TWO_GATHERS[:1] + (EXP, NEG), ""),
        ("cost", TWO_GATHERS[:1] + (EXP, NEG), TWO_GATHERS[:2] + (EXP, NEG), "2 collectives;"),
        ("cost", (EXP, NEG), (EXP, "d: f32[2, 2, 3] = aten.stack([I.x, I.y])"), "144 bytes that"),
        ("order", TWO_GATHERS, TWO_GATHERS, ""),
        ("order", TWO_GATHERS, (*TWO_GATHERS[:1], *TWO_GATHERS[2:3], NEG), ""),
        (
            "order",
            (ALL_REDUCE.format("I.x"), TWO_GATHERS[1], EXP, NEG),
            (TWO_GATHERS[1], ALL_REDUCE.format("I.x"), EXP, NEG),
            "is not launched where it was, among the collectives of [0, 1]",
        ),
        ("order", (EXP, NEG), (TWO_GATHERS[1], EXP, NEG), "b (all_gather_into_tensor"),
        ("order", (EXP, NEG), (NEG, EXP), ""),
        ("idempotence", (EXP, NEG), (NEG, EXP), ""),
    ],
)
def test_a_claim_is_broken_or_holds(gt_world, claim, before, after, words):
    broken = broken_claim([claim], nothing, parse(*after), parse(*before))
    assert (broken is None) == (not words)
    if broken is not None:
        assert broken[0] == claim
        assert words in broken[1]


def adding_pass(gm, inputs=None):
    """Adds a zero each time it runs."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.exp.default):
        with gm.graph.inserting_before(node):
            more = gm.graph.call_function(aten.add.Scalar, (node.args[0], 0.0))
        more.meta.update(node.meta, val=node.args[0].meta["val"])
        node.args = (more,)
    gm.recompile()
    return gm


def raising_again_pass(gm, inputs=None):
    if gm.graph.find_nodes(op="call_function", target=aten.add.Scalar):
        raise RuntimeError("once is enough")
    return adding_pass(gm)


def moving_pass(gm, inputs=None):
    """Turns the first two operators round."""
    first = gm.graph.find_nodes(op="call_function", target=aten.exp.default)[0]
    first.next.append(first)
    gm.recompile()
    return gm


@pytest.mark.gt_world("fake", size=2)
@pytest.mark.parametrize(
    ("a_pass", "words"),
    [
        (adding_pass, "a second run makes add_scalar_1 (aten.add.Scalar) of (add_scalar, 0.0)"),
        (raising_again_pass, "a second run raises RuntimeError: once is enough"),
        (moving_pass, "a second run leaves 6 nodes of 6, or moves some"),
    ],
)
def test_a_second_run_changes_nothing(gt_world, a_pass, words):
    before, sin = parse(EXP, NEG), "h: f32[2, 3] = aten.sin(I.x)"
    if a_pass is moving_pass:
        before = parse(EXP, NEG, sin)
    after = a_pass(parse(EXP, NEG) if a_pass is not moving_pass else parse(EXP, NEG, sin))
    _, found = broken_claim(["idempotence"], a_pass, after, before)
    assert found == words


def test_claims_are_known():
    assert check_claims("order, memory") == ("order", "memory")
    assert check_claims(None) == ()
    with pytest.raises(ValueError, match="--claims=speed: speed is none of memory, cost, order"):
        check_claims("speed")


@pytest.mark.parametrize("spelled", ["", " ", ",", "memory,", "memory, ,cost"])
def test_a_claim_that_is_empty_is_refused(spelled, capsys):
    """As ``--claims "$CLAIMS"`` of an unset variable: it would claim nothing, without a word."""
    given = ["fuzz", "--gt-pass", "tests.attack.test_claims:unused", "--claims", spelled]
    assert main(given) == 2
    says = f"fuzz: --claims={spelled} names a claim that is empty, and would claim nothing: name"
    assert says in capsys.readouterr().err


@pytest.mark.second_tier
def test_fuzz_finds_and_reduces_a_broken_claim(tmp_path, capsys):
    """Values are kept, so without the claim nothing is found."""
    given = ["fuzz", "--gt-pass", f"{__name__}:adding_pass", "--folder", str(tmp_path)]
    given += ["--minutes", "0.4", "--nodes", "20", "--failures", "1"]
    assert main([*given, "--claims", "idempotence"]) == 1
    assert "idempotence: a second run makes add_scalar" in capsys.readouterr().err
    (path,) = tmp_path.iterdir()
    assert path.read_text().partition("if I:")[2].count("aten.") == 1


def test_every_claim_is_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["fuzz", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert ", ".join(CLAIMS) in words
