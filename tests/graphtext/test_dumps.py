"""Graphs as ``print_readable``, tlparse and ``fx_graph_runnable`` files show them are read back."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from pytest_gtrainer import gt_compile
from pytest_gtrainer.graphtext import TextError, parse, render

ROOT = Path(__file__).parents[2]
RUNNABLE = """
import torch
from torch.nn import *
class Repro(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()

    def forward(self, primals_1, primals_2):
        permute = torch.ops.aten.permute.default(primals_1, [1, 0]);  primals_1 = None
        mm = torch.ops.aten.mm.default(primals_2, permute);  primals_2 = permute = None
        split = torch.ops.aten.split.Tensor(mm, 2, 1);  mm = None
        getitem = split[0];  split = None
        full = torch.ops.aten.full.default([], 0.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'), pin_memory = False)
        return [getitem, full]

def load_args(reader):
    buf0 = reader.storage(None, 64)
    reader.tensor(buf0, (4, 8), is_leaf=True)  # primals_1
    buf1 = reader.storage(None, 32)
    reader.tensor(buf1, (2, 8), (1, 2), dtype=torch.float32)  # primals_2
"""  # noqa: E501


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(8, 16, bias=False),
            nn.BatchNorm1d(16),
            nn.Linear(8, 8),
        )

    def forward(self, x):
        left, right = checkpoint(self.body, x, use_reentrant=False).chunk(2, 1)
        return x[:, None] + self.down(torch.cat([right, -left / 2])).unsqueeze(0) * x.shape[0]

    def body(self, x):
        return self.norm(torch.relu(self.up(x)))


def computed(gm: fx.GraphModule):
    """Return by node its target, its operands and its result; an item stands for its tuple."""
    place = {node: index for index, node in enumerate(gm.graph.nodes)}
    found_nodes = []
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            operands = fx.node.map_arg((node.args, node.kwargs), lambda source: place[source])
            value = node.meta.get("val", node.meta.get("example_value"))
            layout = (
                (value.dtype, value.shape, value.stride())
                if isinstance(value, torch.Tensor)
                else None
            )
            found_nodes.append((node.op, str(node.target), str(operands), layout))
    return found_nodes


def shown(gm):
    return gm.print_readable(print_output=False, include_stride=True, include_device=True)


@pytest.fixture(scope="module")
def stages():
    torch.manual_seed(0)
    with gt_compile() as record:
        torch.compile(Model())(torch.randn(4, 8)).sum().backward()
    names = "dynamo joint forward backward forward_after_passes backward_after_passes"
    return {name: getattr(record, name) for name in names.split()}


@pytest.mark.parametrize(
    "stage", ["joint", "forward", "backward", "forward_after_passes", "backward_after_passes"]
)
def test_the_code_of_a_stage_is_read_as_its_graph(stages, stage):
    gm, text = stages[stage], shown(stages[stage])
    assert computed(parse(text)) == computed(gm)
    assert computed(parse(text.replace("aten.mm.", "aten.matmul.", 1))) != computed(gm)
    assert render(parse(text.replace('"f32[', '"bf16[', 1))) != render(parse(text))
    assert render(parse(render(parse(text)))) == render(parse(text))


@pytest.mark.parametrize(("index", "shown_index"), [("0", ""), ("1", ":1"), ("12", ":1")])
def test_a_second_device_of_a_dump_is_another_one(stages, index, shown_index):
    """Indices of a dump of another rank are no difference."""
    text = shown(stages["forward"]).replace("cpu", "cuda:0")
    last = text.rindex("cuda:0")
    other = text[:last] + f"cuda:{index}" + text[last + len("cuda:0") :]
    assert ('device("cuda:1")' in render(parse(other))) == bool(shown_index)
    assert render(parse(text)) == render(parse(text.replace("cuda:0", "cuda:5")))


def test_dynamos_code_has_methods_operators_of_python_and_bodies(stages):
    gm = stages["dynamo"]
    again = parse(shown(gm))
    calls = [(kind, target) for kind, target, _, _ in computed(again)]
    assert calls == [(kind, target) for kind, target, _, _ in computed(gm)]
    bodies = [body for body in again.children() if isinstance(body, fx.GraphModule)]
    (inner,) = (body for body in gm.children() if isinstance(body, fx.GraphModule))
    assert [computed(body) for body in bodies] == [computed(inner)]


def test_a_runnable_file_tells_types_of_inputs_alone():
    gm = parse(RUNNABLE)
    assert [node.meta["val"].stride() for node in gm.graph.find_nodes(op="placeholder")] == [
        (8, 1),
        (1, 2),
    ]
    text = render(gm)
    assert "mm: f32[2, 4] = aten.mm(A.primals_2, permute)" in text
    assert "returns = list" in text
    assert text != render(
        parse(RUNNABLE.replace("(2, 8), (1, 2), dtype=torch.float32", "(3, 8), (1, 3)"))
    )
    first, full = gm(torch.ones(4, 8), torch.ones(2, 8))
    assert first.equal(torch.full((2, 2), 8.0))
    assert full.item() == 0


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "(4, 8), is",
            "(4, 7), is",
            "line 1: the file has types of inputs only, and no fake tensor passes: ",
        ),
        (
            "aten.mm.default",
            "aten.mn.default",
            "line 10, column 9: torch has no operator `aten.mn`",
        ),
        ("full = torch", "full = self.constant + torch", "line 13, column 9: no `constant`: "),
        (
            "torch.ops.aten.full.default([], 0.0, ",
            "print(",
            "line 13, column 16: expected a call of an operator",
        ),
        (
            "getitem = split[0]",
            "getitem = self.held",
            "line 12, column 9: the dump does not hold `self.held`: ",
        ),
        (
            "getitem = split[0]",
            "split.data = mm",
            "line 12, column 9: expected a line of a graph's code",
        ),
        (
            "(self, primals_1, ",
            "(self, ",
            "line 8, column 5: there are 1 inputs, and load_args has 2",
        ),
        ("def forward", "def backward", "line 4, column 1: Repro has no forward"),
        (
            "def load",
            "class B(nn.Module):\n    pass\ndef load",
            "line 16, column 1: this holds several graphs",
        ),
        (
            "(self, primals_1, ",
            '(self, primals_1: "f99(2)", ',
            "line 8, column 23: expected a type like",
        ),
        (
            "(self, primals_1, ",
            '(self, primals_1: "f99[2]", ',
            "line 8, column 23: `f99` is no dtype",
        ),
    ],
)
def test_what_cannot_be_read_is_told_with_its_line(old, new, problem):
    assert RUNNABLE.count(old) == 1
    with pytest.raises(TextError) as raised:
        parse(RUNNABLE.replace(old, new))
    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize(
    ("token", "value"), [("0.1", 0.1), ("1e-05", 1e-05), ("2.0", 2.0), ("3", 3)]
)
def test_a_number_of_a_dump_keeps_its_kind(token, value):
    """0.1 was read as the whole number 0."""
    gm = parse(
        f'class M(torch.nn.Module):\n    def forward(self, x: "f32[2]", y: "Sym({token})"):\n'
        f"        return x\n"
    )
    kept = gm.graph.find_nodes(op="placeholder")[1].meta["val"]
    assert (type(kept), kept) == (type(value), value)


def test_symbols_of_a_dump_are_sizes_and_floats():
    gm = parse(
        "class M(torch.nn.Module):\n"
        '    def forward(self, x: "Sym(zf0)", n: "Sym(s1)", rows: "f32[s1][1]cpu"):\n'
        '        mul: "f32[s1][1]cpu" = torch.ops.aten.mul.Tensor(rows, x)\n'
        "        return (mul, n)\n"
    )
    x, n, _ = (node.meta["val"] for node in gm.graph.find_nodes(op="placeholder"))
    assert (type(x), type(n)) == (torch.SymFloat, torch.SymInt)
    (mul,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert str(mul.meta["val"].shape[0]) == str(n) != str(x)


def test_a_dump_that_is_nested_too_deeply_is_told():
    deep = f"reader.tensor(0, ({'-' * 2000}2,))\n"
    with pytest.raises(TextError, match="nested too deeply"):
        parse(
            f'class M(torch.nn.Module):\n    def forward(self, x: "f32[2]"):\n'
            f"        return x\n\n{deep}"
        )


@pytest.mark.second_tier
def test_every_graph_that_tlparse_shows_is_read(tmp_path):
    """Also with dynamic sizes; what lies beside the graphs is reported as no graph."""
    tlparse = shutil.which(
        "tlparse", path=f"{ROOT}/.venv/beside/bin{os.pathsep}{os.environ['PATH']}"
    )
    if tlparse is None:
        pytest.skip("tlparse is not installed: make env")
    program = (
        "import torch\nfrom tests.graphtext.test_dumps import Model\n"
        "torch._inductor.config.force_disable_caches = True\n"
        "torch.compile(Model(), dynamic=True)(torch.randn(4, 8)).sum().backward()\n"
    )
    traced = {**os.environ, "TORCH_TRACE": str(tmp_path / "trace"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=traced, check=True, capture_output=True)
    (log,) = (tmp_path / "trace").iterdir()
    subprocess.run(
        [tlparse, log, "-o", tmp_path / "out", "--no-browser"], check=True, capture_output=True
    )
    read = {}
    for file in sorted((tmp_path / "out").glob("*/*.txt")):
        if "(torch.nn.Module):" in file.read_text():
            gm = parse(file.read_text())
            assert ": _" not in render(gm), file.name
            read[file.name.rpartition("_")[0]] = len(gm.graph.nodes)
    stages = {
        "dynamo_output_graph",
        "aot_joint_graph",
        "aot_forward_graph",
        "inductor_post_grad_graph",
    }
    assert stages | {"aot_backward_graph", "fx_graph_runnable"} <= read.keys()
