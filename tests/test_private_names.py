"""Private names of torch and pytest stand in the files that say so, and those files say all of them
once.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pytest_gtrainer"
ALLOWED = (PACKAGE / "_torch", PACKAGE / "_pytest_private.py")
STANDARD_LIBRARY = ("sys", "os", "subprocess")
NAMED_TUPLES = ("_replace", "_asdict", "_fields")
FILES = [*sorted(path for path in ALLOWED[0].glob("*.py") if path.stem != "__init__"), ALLOWED[1]]


def is_private(name: str) -> bool:
    """Return whether a dotted name has a part that begins with an underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield the names that an import binds, each with the dotted name that it stands for."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif alias.asname:
            yield alias.asname, alias.name
        else:
            first = alias.name.partition(".")[0]
            yield first, first


def private_names(source: str) -> Iterator[str]:
    """Private names of others that a file uses: by import, or as attributes of what it did not
    define itself.

    Operators are no private names: ``aten._unsafe_view`` is what graphs, and goldens, call it.
    """
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own |= {node.attr for node in ast.walk(tree) if is_of_self(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for _, path in imported_names(node):
                if path.partition(".")[0] in ("torch", "pytest", "_pytest") and is_private(path):
                    yield f"line {node.lineno}: import of {path}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not is_of_self(node):
            text = ast.unparse(node.value)
            if (
                node.attr in own
                or node.attr in NAMED_TUPLES
                or text in STANDARD_LIBRARY
                or text.endswith("aten")
            ):
                continue
            yield f"line {node.lineno}: {text}.{node.attr}"


def is_of_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


def test_private_names_of_torch_and_pytest_stand_in_their_files():
    offenders = [
        f"{file.relative_to(PACKAGE)}, {found}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if not any(file.is_relative_to(allowed) for allowed in ALLOWED)
        for found in private_names(file.read_text())
    ]
    assert not offenders, (
        "move these to a topic of _torch, or to _pytest_private.py:\n" + "\n".join(offenders)
    )


@pytest.mark.parametrize(
    "source",
    [
        "from torch._ops import OpOverload",
        "import torch.utils._pytree as pytree",
        "from _pytest.main import Session",
        "import torch\ntorch._C._set_deterministic_algorithms(True)",
        "def ranks(mesh): return mesh._get_root_mesh()",
    ],
)
def test_the_reader_of_sources_finds_one(source: str):
    """The twin."""
    assert list(private_names(source))


def replaced_names(source: str) -> Iterator[str]:
    """Names of torch and pytest in whose place a file puts something of its own: by assignment, or
    a patch.
    """
    tree, hosts = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            paths = imported_names(node)
            hosts |= {
                bound: path
                for bound, path in paths
                if path.partition(".")[0] in ("torch", "pytest", "_pytest")
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            places = []
            for target in node.targets:
                places += target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            written = [place for place in places if isinstance(place, ast.Attribute)]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("setattr", "patch.object"))
            and len(node.args) + len(node.keywords) > 2
        ):
            written = [
                ast.Attribute(node.args[0], ast.literal_eval(node.args[1]))
                if isinstance(node.args[1], ast.Constant)
                else ast.Attribute(node.args[0], "...")
            ]
        else:
            continue
        for target in written:
            first, *rest = ast.unparse(target).split(".")
            if first in hosts and rest[0] != "...":
                yield ".".join([hosts[first], *rest])


REPLACED = {
    # put back when the block ends
    "_torch/arithmetic.py": {"torch.UntypedStorage.resize_"},
    "_torch/autograd.py": {
        "torch.autograd._engine_run_backward",
        "torch.autograd.graph._engine_run_backward",
    },
    "_torch/compiling.py": {"torch._inductor.compile_fx.compile_fx"},
    "_torch/passes.py": {"torch.distributed.is_nccl_available"},
    # in ranks alone
    "ranks/inside/debugger.py": {"torch.distributed.breakpoint"},
    # sends and receives are counted
    "ranks/inside/messages.py": {
        "torch.distributed.ProcessGroup.send",
        "torch.distributed.ProcessGroup.recv",
        "torch.distributed.ProcessGroup.recv_anysource",
        "torch.distributed.ProcessGroup.monitored_barrier",
    },
    # settings, which are put back
    "_torch/modes.py": {
        "torch.backends.cuda.matmul.fp32_precision",
        "torch.backends.mkldnn.matmul.fp32_precision",
    },
    # a setting, and the place that torch says may be replaced
    "_torch/process_groups.py": {"torch.distributed.c10d_logger._c10d_logger.disabled"},
    "_torch/fake_groups.py": {
        "torch.distributed.distributed_c10d._world",
        # in a fake world; put back
        "torch.distributed.distributed_c10d._new_process_group_helper",
        "torch.distributed.distributed_c10d._get_default_timeout",
        "torch.distributed.distributed_c10d.init_process_group",
        "torch.distributed.init_process_group",
    },
    "_torch/threads.py": {
        "torch.distributed.distributed_c10d._world",
        # while ranks are threads, which must not trace or compile; put back
        "torch.compile",
        "torch._dynamo.eval_frame._callback_from_stance",
        "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode.__enter__",
    },
}
"""Names of torch that the package replaces; docs/architecture.md says why and for how long."""


def test_nothing_else_of_torch_or_pytest_is_replaced():
    found: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in replaced_names(file.read_text()):
            found.setdefault(str(file.relative_to(PACKAGE)), set()).add(name)
    counts = ".group_count", ".default_pg"  # of a world that is ours
    found = {
        file: {name for name in names if not name.endswith(counts)} for file, names in found.items()
    }
    assert found == REPLACED


def test_the_architecture_names_the_public_functions_that_are_replaced():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    section = page.partition("## What of torch is replaced")[2].partition("\n## ")[0]
    missing = []
    for file, names in REPLACED.items():
        if file == "_torch/modes.py":
            continue  # settings
        for name in sorted(names):
            last = name.rpartition(".")[2]
            if not is_private(name) and not last.startswith("__") and last not in section:
                missing.append(name)
    assert not missing


@pytest.mark.parametrize(
    "line",
    [
        "dist.barrier = 7",
        "dist.barrier, own = 7, 8",
        "setattr(dist, 'barrier', 7)",
        "p.setattr(dist, 'barrier', 7)",
        "mock.patch.object(dist, 'barrier', return_value=7)",
    ],
)
def test_the_reader_of_sources_finds_what_is_replaced(line: str):
    """The twin."""
    assert list(replaced_names(f"import torch.distributed as dist\n{line}")) == [
        "torch.distributed.barrier"
    ]


def table_of(tree: ast.Module) -> tuple[ast.stmt | None, dict[str, tuple[str, ...]]]:
    """The table ``ATTRIBUTES`` of a file: its statement, and attributes by owner."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ATTRIBUTES":
            return node, ast.literal_eval(node.value)
    return None, {}


def drift(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Attributes that a file reads and its table lacks, and those that the table names and the file
    does not use.

    Private attributes of torch and pytest belong into the table, and attributes of a module or
    class that is private.
    """
    statement, table = table_of(tree)
    named = {name for names in table.values() for name in names}
    owners = {part for owner in table for part in owner.replace(":", ".").split(".")}
    in_table = set(ast.walk(statement)) if statement else set()
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in ast.walk(tree) if is_of_self(node)}
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= dict(imported_names(node))

    needed, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in in_table:  # getattr(torch._C, name)
            used.add(node.value)
        if not isinstance(node, ast.Attribute):
            continue
        used.add(node.attr)
        if is_of_self(node) or node.attr in own or node.attr in NAMED_TUPLES:
            continue
        owner = bound.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
        of_private = owner.partition(".")[0] in ("torch", "_pytest") and is_private(owner)
        if is_private(node.attr) or of_private:
            needed.add(node.attr)
    imported = {path.rpartition(".")[2] for path in bound.values()}
    return needed - imported - named - owners, named - used


EXEMPT = {
    "compiling": {"clear"},  # of a dict
    "process": {"_cuda_clearCublasWorkspaces"},  # builds for CPU do without it
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_topic_says_whose_attributes_it_uses_and_no_others(file: Path):
    unnamed, unused = drift(ast.parse(file.read_text()))
    unnamed -= EXEMPT.get(file.stem, set())
    assert not unnamed, (
        f"{file.name}: put these into ATTRIBUTES, by the class or module that has them"
    )
    assert not unused, f"{file.name}: ATTRIBUTES names what the file does not use"


def test_a_table_that_has_drifted_is_found():
    """The twin."""
    source = (
        'import torch._ops as ops\nATTRIBUTES = {"torch.fx:Graph": ("_len",)}\n\n\n'
        "def f(graph):\n    return graph._insert, ops.spoken\n"
    )
    assert drift(ast.parse(source)) == ({"_insert", "spoken"}, {"_len"})


def test_the_package_of_topics_imports_none_of_them():
    probe = "import sys, pytest_gtrainer._torch; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True
    ).stdout.split()
    assert "pytest_gtrainer._torch" in loaded
    assert not [
        name for name in loaded if name == "torch" or name.startswith("pytest_gtrainer._torch.")
    ]


def test_what_is_private():
    assert [is_private(name) for name in ("torch._C", "fx.Graph", "__name__")] == [
        True,
        False,
        False,
    ]
