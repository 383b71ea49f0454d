"""``python -m pytest_gtrainer reduce``: mistakes end at a few nodes; bad input is named."""

import itertools
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import graphtext
from pytest_gtrainer.__main__ import main
from pytest_gtrainer.attack.oracles import NOT_JUDGED, Failure, by_command, by_proof
from pytest_gtrainer.attack.reduce import Reduction, minimize, spell
from pytest_gtrainer.attack.sizes import resize
from pytest_gtrainer.testing import run_pass_file

aten = torch.ops.aten
SIZE = 8


def merge_buffers_pass(gm, inputs=None):
    """Merges fresh buffers of one size, though one of them is written."""
    fresh = {}
    for node in list(gm.graph.find_nodes(op="call_function", target=aten.empty_like.default)):
        first = fresh.setdefault(node.args, node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def divide_pass(gm, inputs=None):
    """Crashes on a division by a number that is 4."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.div.Tensor):
        if node.args[1] == 4:
            raise KeyError("a factor")
    return gm


def mean_pass(gm, inputs=None):
    """Forgets to divide a sum over ranks."""
    target = torch.ops._c10d_functional.all_reduce.default
    for node in gm.graph.find_nodes(op="call_function", target=target):
        node.args = (node.args[0], "sum", *node.args[2:])
    gm.recompile()
    return gm


def right_pass(gm, inputs=None):
    return gm


def exit_pass(gm, inputs=None):
    sys.exit(0)


def not_a_graph_pass(gm, inputs=None):
    return 3


def buffers(x, w):
    for _ in range(12):
        x = torch.relu(x @ w) + x
    first = torch.empty_like(x)
    first.fill_(1.0)
    second = torch.empty_like(x)
    second.fill_(2.0)
    for _ in range(12):
        x = torch.tanh(x @ w) * first
    return x.sum(), (x / 4 + second).sum(0)


@pytest.fixture
def graph(tmp_path):
    gm = make_fx(buffers, tracing_mode="fake")(torch.ones(6, 8), torch.ones(8, 8))
    path = tmp_path / "graph.fxgraph"
    path.write_text(graphtext.render(gm))
    return path


def reduce(*arguments):
    return main(["reduce", *map(str, arguments)])


@hypothesis.given(st.integers(1, 40), st.data())
def test_minimize_keeps_what_is_needed_and_no_more(count, data):
    """Delta debugging of a failure that needs some items ends at these."""
    needed = set(data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True)))
    assert minimize(range(count), lambda part: needed <= set(part)) == sorted(needed)


@pytest.mark.second_tier
def test_a_proof_of_a_pass(graph, capsys):
    """Fifty nodes end at five: two buffers, what writes them, and one reader."""
    assert reduce(graph, "--proof", f"{__name__}:merge_buffers_pass") == 0
    shown = capsys.readouterr()
    found = graph.with_suffix(".reduced.fxgraph").read_text()
    assert graphtext.parse(found).graph.find_nodes(
        op="call_function", target=aten.empty_like.default
    )
    lines = [line for line in found.splitlines() if "aten." in line]
    assert len(lines) <= 5, found
    assert found.count("aten.fill_") == 2, "unwritten memory alone is no mistake"
    assert "[1, 1]" in found, "its sizes are reduced, too"
    assert "nodes are" in shown.err
    assert "not reordered: first " in shown.err
    path = graph.with_suffix(".reduced.fxgraph")
    with pytest.raises(AssertionError, match="after the passes against before"):
        run_pass_file(path, passes={"merge_buffers_pass": merge_buffers_pass})
    run_pass_file(path, passes={"merge_buffers_pass": right_pass})


def test_a_pass_that_raises(graph):
    assert reduce(graph, "--proof", f"{__name__}:divide_pass") == 0
    found = graph.with_suffix(".reduced.fxgraph").read_text()
    assert [line for line in found.splitlines() if "aten." in line] == [
        "  div: f32[1, 1] = aten.div.Tensor(I.mul_11, 4)"
    ] or found.count("aten.") == 1


def test_a_pass_that_exits(graph, capsys):
    """``sys.exit(0)`` is a failure of the pass, not the end of the command."""
    assert reduce(graph, "--proof", f"{__name__}:exit_pass") == 0
    assert "SystemExit: the pass raises SystemExit: 0" in capsys.readouterr().err
    assert graph.with_suffix(".reduced.fxgraph").exists()


def test_a_module_that_exits_when_it_is_imported(graph, tmp_path, monkeypatch, capsys):
    (tmp_path / "exits_when_imported.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert reduce(graph, "--proof", "exits_when_imported:a_pass") == 2
    assert "importing exits_when_imported calls sys.exit(0)" in capsys.readouterr().err


def test_fewer_ranks(tmp_path):
    """A sum over eight ranks is wrong on two already."""
    text = """# gtrainer graph v2
# world: fake 8
# mesh: dp=8
dp = group(range(0, 8))
if I:
  I.x: f32[4, 6]
if fwd:
  with loss:
    relu: f32[4, 6] = aten.relu(I.x)
    all_reduce: f32[4, 6] = _c10d_functional.all_reduce(relu, "avg", dp)
    wait_tensor: f32[4, 6] = _c10d_functional.wait_tensor(all_reduce)
    sum: f32[6] = aten.sum.dim_IntList(wait_tensor, [0])
if out:
  yield fwd.loss.sum
"""
    path = tmp_path / "sum.fxgraph"
    path.write_text(text)
    assert reduce(path, "--proof", f"{__name__}:mean_pass") == 0
    found = path.with_suffix(".reduced.fxgraph").read_text()
    assert "group(range(0, 2))" in found
    assert "# world: fake 2" in found
    assert "aten." not in found


@pytest.mark.second_tier
def test_a_command(graph, tmp_path):
    """It fails where the file still has a tanh and a relu."""
    script = tmp_path / "check.py"
    script.write_text(
        "import sys\ntext = open(sys.argv[1]).read()\n"
        "assert not ('aten.tanh' in text and 'aten.relu' in text)\n"
    )
    assert reduce(graph, "--test", f"{sys.executable} {script}") == 0
    found = graph.with_suffix(".reduced.fxgraph").read_text()
    assert found.count("aten.") == 2


@pytest.mark.second_tier
def test_another_failure_is_kept_beside(graph, tmp_path, capsys):
    script = tmp_path / "check.py"
    script.write_text(
        "import sys\ntext = open(sys.argv[1]).read()\n"
        "if 'aten.relu' not in text:\n    raise ValueError('no relu')\n"
        "assert 'aten.tanh' not in text\n"
    )
    assert reduce(graph, "--test", f"{sys.executable} {script}") == 0
    found = graph.with_suffix(".reduced.fxgraph").read_text()
    assert found.count("aten.") == 2
    assert graph.with_suffix(".reduced.other.fxgraph").exists()
    assert (
        "another graph fails otherwise, with exit status 1, ValueError" in capsys.readouterr().err
    )


def test_the_other_failure_that_is_kept_is_the_smallest_that_says_something():
    lines, source = [], "I[0]"
    for name in ("neg", "relu", "tanh", "exp", "sin", "abs"):
        lines.append(f"    {name}: f32[4] = aten.{name}({source})\n")
        source = name
    text = f"if I:\n  I[0]: f32[4]\nif fwd:\n  with _:\n{''.join(lines)}if out:\n  out[0] = abs\n"
    others, unjudged = [], []

    def judge(text):
        if "aten.tanh" in text and "aten.sin" in text:
            return Failure("TypeError", "as at first")
        if "aten.neg" in text:
            unjudged.append(text)
            return Failure("unknown", "nobody knows")
        others.append(text)
        return Failure("ValueError", "another one")

    whole = spell(graphtext.parse(text), text)
    reduction = Reduction(whole, judge(whole), judge, lambda _: None, lambda _: None)
    reduction.run()
    assert reduction.text.count("aten.") == 2
    assert unjudged
    assert len(others[0]) > min(map(len, others)), "a later one is smaller"
    assert reduction.other == (min(others, key=len), Failure("ValueError", "another one"))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_resized_input_lies_in_memory_as_before(order):
    """Passes read strides: a transposed input stays transposed."""
    mode = FakeTensorMode()
    with mode:
        value = torch.empty([(2, 5, 7)[dim] for dim in order])
        value = value.permute([order.index(dim) for dim in range(3)])
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = value
    graph.output((graph.call_function(aten.neg.default, (given,)),))
    gm = resize(fx.GraphModule({}, graph), lambda size: 3 if size == 7 else size)
    [given] = gm.graph.find_nodes(op="placeholder")
    resized = given.meta["val"]
    assert list(resized.shape) == [2, 5, 3]
    assert sorted(range(3), key=lambda dim: -resized.stride(dim)) == list(order)
    assert gm.graph.output_node().args[0][0].meta["val"].stride() == resized.stride()


def test_the_limit_of_a_command(tmp_path):
    judge = by_command("sleep 20 #", tmp_path, 0.2)
    assert judge("") == Failure("timeout", "no end within 0.2 s")


@pytest.mark.second_tier
def test_it_goes_on_where_it_was_cut(graph, capsys):
    arguments = graph, "--proof", f"{__name__}:divide_pass"
    assert reduce(*arguments) == 0
    first = graph.with_suffix(".reduced.fxgraph").read_text()
    capsys.readouterr()
    assert reduce(*arguments) == 0
    assert graph.with_suffix(".reduced.fxgraph").read_text() == first
    assert "goes on with" in capsys.readouterr().err


def test_an_interrupt_keeps_the_smallest(graph, monkeypatch, capsys):
    original = Reduction._drop_results

    def interrupted(self):
        original(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Reduction, "_drop_results", interrupted)
    assert reduce(graph, "--proof", f"{__name__}:divide_pass") == 130
    assert "Run it again to go on" in capsys.readouterr().err
    text = graph.with_suffix(".reduced.fxgraph").read_text()
    assert len(text) < len(graph.read_text())
    graphtext.parse(text)


@pytest.mark.parametrize(
    ("proof", "status", "says"),
    [
        ("{module}:right_pass", 1, "does not fail, so there is nothing to reduce"),
        ("{module}:missing_pass", 2, "has no attribute 'missing_pass'"),
        ("no_such_module:a_pass", 2, "No module named 'no_such_module'"),
        ("right_pass", 2, "expected module:name"),
        ("{module}:SIZE", 2, "SIZE is of type int, not a pass"),
    ],
)
def test_passes_that_cannot_be_reduced(graph, capsys, proof, status, says):
    assert reduce(graph, "--proof", proof.format(module=__name__)) == status
    assert says in capsys.readouterr().err
    assert not graph.with_suffix(".reduced.fxgraph").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("", "no result depends on an abstract input"),
        ("x = (", "graph text is a part of Python"),
        ("# gtrainer graph v2\n# view: layout\n", "this is the layout view"),
    ],
)
def test_files_that_are_no_graphs(tmp_path, capsys, text, says):
    path = tmp_path / "graph.fxgraph"
    if text is not None:
        path.write_text(text)
    assert reduce(path, "--proof", f"{__name__}:right_pass") == 2
    assert says in capsys.readouterr().err


def test_a_file_of_somebody_else_stays(graph, capsys):
    output = graph.with_name("mine.fxgraph")
    output.write_text("mine")
    assert reduce(graph, "--proof", f"{__name__}:divide_pass", "-o", output) == 2
    assert output.read_text() == "mine"
    assert "exists and was not reduced from" in capsys.readouterr().err


def test_kinds_have_names(graph, capsys):
    assert reduce(graph, "--proof", f"{__name__}:divide_pass", "--at-least", "equal") == 2
    assert "--at-least=equal: the kinds are identical" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--test", "no_such_command"), "no_such_command"),
        (("--test", "true", "--timeout", "0"), "--timeout=0.0: give seconds above 0"),
        (("--test", "true", "-o", "{folder}"), "is no file of a folder that exists"),
        (("--test", "true", "-o", "{folder}/no/x"), "is no file of a folder that exists"),
    ],
)
def test_arguments_that_cannot_be_used(graph, capsys, arguments, says):
    given = [each.format(folder=graph.parent) for each in arguments]
    assert reduce(graph, *given) == 2
    assert says in capsys.readouterr().err


def test_what_was_reduced_for_another_pass_stays(graph, capsys):
    """Its smallest graph may not fail for this one."""
    assert reduce(graph, "--proof", f"{__name__}:divide_pass") == 0
    before = graph.with_suffix(".reduced.fxgraph").read_text()
    assert reduce(graph, "--proof", f"{__name__}:merge_buffers_pass") == 2
    assert "by the same pass or command: remove it" in capsys.readouterr().err
    assert graph.with_suffix(".reduced.fxgraph").read_text() == before


def test_what_a_command_has_started_ends_with_it(tmp_path):
    mark = f"{tmp_path.name}.41"
    judge = by_command(f"sh -c 'sleep 41; : {mark}' #", tmp_path, 0.3)
    assert judge("").kind == "timeout"
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert mark not in shown.stdout


def unrunnable_pass(gm, inputs=None):
    """Leaves a division without its second operand."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.div.Tensor):
        node.args = node.args[:1]
    gm.recompile()
    return gm


def test_a_graph_that_cannot_run_is_a_failure(graph, capsys):
    assert reduce(graph, "--proof", f"{__name__}:unrunnable_pass") == 0
    assert "cannot run: what the pass leaves raises" in capsys.readouterr().err
    assert graph.with_suffix(".reduced.fxgraph").read_text().count(" = aten.") == 1


def test_weaker_kinds_are_written_in_one_line(graph):
    proof = f"{__name__}:merge_buffers_pass"
    assert reduce(graph, "--proof", proof, "--at-least", "rounds elsewhere") == 0
    graphtext.parse(graph.with_suffix(".reduced.fxgraph").read_text())


EARLY = """
fsdp = group(range(0, 2))
if I:
  I.x: f32[2, 4]
if fwd:
  with _:
    gather: f32[4, 4] = _c10d_functional.all_gather_into_tensor(I.x, 2, fsdp)
if out:
  yield fwd._.gather
"""


@pytest.mark.gt_world("fake", size=2, mesh={"fsdp": 2})
def test_a_graph_that_does_not_wait_is_no_failure_of_a_pass():
    """Else a reduction of any RuntimeError would end at it, as the lint blames the pass."""
    failure = by_proof(right_pass, "reordered")(EARLY)
    assert failure.kind in NOT_JUDGED
    assert failure.words == "output reads gather, which may not be there"
