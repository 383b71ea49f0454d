"""One golden serves all supported versions of torch: what one only spells differently is no
difference.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import environment
from pytest_gtrainer.golden.compare import difference
from pytest_gtrainer.graphtext import header
from pytest_gtrainer.graphtext.torch_spellings import SPELLINGS

OLD, NEW = "2.13.0+cpu", "2.15.0+cu132"
OLD_BODY = """
if I:
  I[0]: f32[4, 2]
if fwd:
  with up:
    addmm: f32[4, 3] = aten.addmm(I[0], I[0], I[0])
    view: f32[2, 2, 3] = aten.view(addmm, [2, 2, 3])
    view_1: f32[4, 3] = aten.view(view, [4, 3])
    mm: f32[4, 3] = aten.mm(view_1, I[0])
    _unsafe_view: f32[2, 2, 3] = aten._unsafe_view(mm, [2, 2, 3])
  with loss:
    detach: f32[2, 2, 3] | must_save = aten.detach(up._unsafe_view)
    alias: f32[2, 2, 3] = aten.alias(detach)
    exp: f32[2, 2, 3] = aten.exp(alias)
    add: f32[2, 2, 3] = aten.add.Tensor(exp, up.view)
if out:
  yield fwd.loss.add
"""
NEW_BODY = """
if I:
  I[0]: f32[4, 2]
if fwd:
  with up:
    addmm: f32[4, 3] = aten.addmm(I[0], I[0], I[0])
    _unsafe_view: f32[2, 2, 3] = aten._unsafe_view(addmm, [2, 2, 3])
    view: f32[4, 3] = aten.view(_unsafe_view, [4, 3])
    mm: f32[4, 3] = aten.mm(view, I[0])
    _unsafe_view_1: f32[2, 2, 3] = aten._unsafe_view(mm, [2, 2, 3])
  with loss:
    alias: f32[2, 2, 3] | must_save = aten.alias(up._unsafe_view_1)
    alias_1: f32[2, 2, 3] = aten.alias(alias)
    exp: f32[2, 2, 3] = aten.exp(alias_1)
    add: f32[2, 2, 3] = aten.add.Tensor(exp, up._unsafe_view)
if out:
  yield fwd.loss.add
"""


def text(body: str, version: str | None) -> str:
    return "\n".join(header.write({"torch": version} if version else {})) + body


def in_a_body(body: str) -> str:
    """The same graph inside of another."""
    lines = [f"  {line}" for line in body.strip().splitlines()]
    return "\n".join(
        [
            "",
            "def cond_graph_0():",
            *lines,
            "if I:",
            "  I[0]: f32[4, 2]",
            "if fwd:",
            "  cond: (f32[2, 2, 3],) = hop.cond(True, cond_graph_0, cond_graph_0, (I[0],))",
            "if out:",
            "  yield fwd._.cond[0]",
            "",
        ]
    )


@pytest.mark.parametrize("place", [str, in_a_body], ids=["the graph", "a graph inside it"])
@pytest.mark.parametrize(("made", "running"), [(OLD, NEW), (NEW, OLD)], ids=["newer", "older"])
def test_a_golden_of_another_torch_is_equal_where_only_the_spelling_is_another(
    place, made, running
):
    """P6: both ways."""
    bodies = {OLD: place(OLD_BODY), NEW: place(NEW_BODY)}
    assert difference("graph", text(bodies[made], made), text(bodies[running], running)) is None


@pytest.mark.parametrize(
    ("there", "changed"),
    [
        ("aten.exp(alias_1)", "aten.exp(alias)"),
        ("aten.alias(alias)", "aten.alias(up._unsafe_view)"),
        ("aten.alias(alias)", "aten.clone(alias)"),
        ("aten._unsafe_view(addmm, [2, 2, 3])", "aten._unsafe_view(addmm, [2, 3, 2])"),
        ("aten._unsafe_view(mm, [2, 2, 3])", "aten.view(mm, [2, 2, 3])"),
        ("aten.add.Tensor(exp, up._unsafe_view)", "aten.add.Tensor(exp, up._unsafe_view_1)"),
        ("f32[2, 2, 3] | must_save = aten.alias", "f32[2, 2, 3] = aten.alias"),
        ("    alias: f32[2, 2, 3] | must_save = aten.alias(up._unsafe_view_1)\n", ""),
        ("  with loss:\n    alias:", "    alias:"),
        ("yield fwd.loss.add", "yield fwd.loss.alias_1"),
    ],
)
@pytest.mark.parametrize("place", [str, in_a_body], ids=["the graph", "a graph inside it"])
def test_a_real_change_beside_another_spelling_differs(place, there, changed):
    """P6: the twin: operands, operators, arguments, tags, modules, results, a line less."""
    assert there in NEW_BODY
    new = NEW_BODY.replace(there, changed)
    if changed == "":
        new = new.replace("aten.alias(alias)", "aten.alias(up._unsafe_view_1)")
    assert difference("graph", text(place(OLD_BODY), OLD), text(place(new), NEW)) is not None


def test_another_order_beside_another_spelling_differs():
    first, second = NEW_BODY[
        NEW_BODY.index("    alias_1:") : NEW_BODY.index("    add:")
    ].splitlines(keepends=True)
    in_order = "    sin: f32[2, 2, 3] = aten.sin(alias)\n"
    old = OLD_BODY.replace("    alias: f32", in_order.replace("alias", "detach") + "    alias: f32")
    new = NEW_BODY.replace(first + second, in_order + first + second)
    assert difference("graph", text(old, OLD), text(new, NEW)) is None
    moved = NEW_BODY.replace(first + second, first + in_order + second)
    assert difference("graph", text(old, OLD), text(moved, NEW)).startswith(
        "same dataflow, other schedule (1 of 10"
    )


def test_a_difference_tells_the_real_change_alone_and_whose_words_it_uses():
    message = difference(
        "graph", text(OLD_BODY, OLD), text(NEW_BODY.replace("aten.exp", "aten.sin"), NEW)
    )
    assert message.splitlines()[:4] == [
        "the dataflow differs, first at aten.sin in fwd loss",
        "fwd loss: lost aten.exp, gained aten.sin",
        f"made with torch {OLD}, running {NEW}, and compared with the newer one's names: "
        "aten.alias for aten.detach, aten._unsafe_view for aten.view of aten.addmm",
        "",
    ]
    shown = [line.partition(":")[0] for line in message.splitlines()[6:] if line[0] in "+-"]
    assert shown == [
        "-loss | exp",
        "-loss | add",
        "+loss | exp",
        "+loss | add",
    ]  # the sine and its reader


@pytest.mark.parametrize(
    ("made", "running"),
    [(OLD, OLD), (NEW, "2.15.1"), (None, NEW), ("of my own", NEW)],
    ids=["one version", "one minor version", "not given", "not known"],
)
def test_where_torch_is_the_same_or_not_known_every_word_counts(made, running):
    assert difference("graph", text(OLD_BODY, made), text(NEW_BODY, running)) is not None


def test_each_spelling_is_of_its_version():
    """Between 2.13 and 2.14 only the first changed."""
    half = OLD_BODY.replace("aten.detach", "aten.alias")
    assert difference("graph", text(OLD_BODY, OLD), text(half, "2.14.1")) is None
    assert difference("graph", text(half, "2.14.1"), text(NEW_BODY, NEW)) is None
    message = difference("graph", text(OLD_BODY, OLD), text(NEW_BODY, "2.14.1"))
    assert "lost aten.view, gained aten._unsafe_view" in message


class Mlp(torch.nn.Module):
    """Has all that a version of torch spells in another way, and nothing else to speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().square().mean()
        return self.down(self.up(x).exp()).mul(scale)


def traced_mlp() -> torch.fx.GraphModule:
    with torch.device("meta"):
        model = Mlp()
        x = torch.empty(2, 3, 4)

    def step(weights, x):
        loss = torch.func.functional_call(model, weights, (x,)).sum()
        return loss, torch.autograd.grad(loss, list(weights.values()))

    return make_fx(step)(dict(model.named_parameters()), x)


def test_one_golden_of_a_traced_step_serves_all_versions(gt_golden):
    """Its file was made under torch 2.13: it differs under a version whose spelling is taken out of
    the table.
    """
    gt_golden.check(traced_mlp())


def test_the_table_says_what_this_torch_does():
    """Each entry is of a supported version; its new word, and not its old one, is traced since
    then.
    """
    running = environment.minor_version(torch.__version__)
    traced = [
        (str(node.target).removesuffix(".default"), node) for node in traced_mlp().graph.nodes
    ]
    for spelling in SPELLINGS:
        word, other = (spelling.after, spelling.before)[:: 1 if running >= spelling.since else -1]
        of = [
            name
            for name, node in traced
            if not spelling.of
            or str(node.all_input_nodes[:1]).startswith(f"[{spelling.of.removeprefix('aten.')}")
        ]
        assert word in of
        assert other not in of
    assert all(
        environment.FIRST < spelling.since <= environment.LAST and spelling.reason
        for spelling in SPELLINGS
    )
