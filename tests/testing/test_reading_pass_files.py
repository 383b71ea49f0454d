"""A pass file that says something else than its author meant is refused, with file and line."""

import pytest

from pytest_gtrainer.checks import CheckError, predicates
from pytest_gtrainer.testing import PassFileError, pass_file, pass_files, run_pass_file
from pytest_gtrainer.testing.pass_file import read_pass_file


def error_of(path):
    with pytest.raises(PassFileError) as error:
        run_pass_file(path)
    return str(error.value)


def test_what_a_file_says(write):
    file = read_pass_file(
        write(
            "# D4: for the reader.",
            "# world: fake, 8 ranks, rank 3",
            "# mesh: fsdp=4, ep=2",
            "# passes: b_pass(n=-1, names=['a', None])",
            "# values: same",
        )
    )
    assert [(call.name, dict(call.options)) for call in file.passes] == [
        ("canonicalize_graph_pass", {}),
        ("b_pass", {"n": -1, "names": ["a", None]}),
    ]
    assert (file.world.size, file.world.rank, dict(file.world.mesh)) == (8, 3, {"fsdp": 4, "ep": 2})
    assert (file.values, file.again, file.result, file.golden) == (
        *("same", False, False),
        "full",
    )


@pytest.mark.parametrize("judge", ["# check: then neg", "# raises: words", "# result: unchanged"])
def test_a_file_that_is_judged_by_what_it_says_needs_no_golden(write, judge):
    assert read_pass_file(write(judge)).golden is None
    assert read_pass_file(write(judge, "# golden: schedule")).golden == "schedule"


def test_a_file_with_neither_golden_nor_check_is_an_error(write):
    assert error_of(write("# again: unchanged")).startswith(
        "a.fxgraph has no check and so is compared with a golden"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("# chekc: then mm", "there is no directive `# chekc:`, did you mean `check`?"),
        ("# CHECK-NEXT: mm", "write `# check: next mm`"),
        ("# check then mm", "write `# check: then mm`"),
        ("# check", "write `# check: then aten.mm`"),
        ("# check = never mm", "write `# check: never mm`"),
        ("## check: then mm", "write `# check: then mm`"),
        ("# - check: then mm", "write `# check: then mm`"),
        ("# never: relu", "write `# check: never relu`"),
        ("# NEVER: relu", "write `# check: never relu`"),
        ("# never relu", "write `# check: never relu`"),
        ("# Never relu in fwd", "write `# check: never relu in fwd`"),
        ("# then mm(_, _) -> f32", "write `# check: then mm(_, _) -> f32`"),
        ("# count 7 relu", "write `# check: count 7 relu`"),
        ("# count: 7 relu", "write `# check: count 7 relu`"),
        ("# count-7: relu", "this is only a comment"),
        ("## next: relu", "write `# check: next relu`"),
        ("# - same in fwd", "write `# check: same in fwd`"),
        ("# start", "write `# check: start`"),
        ("if A:  # check: then mm", "`# check:` stands on a line of its own"),
        ("if A:  # never: mm", "`# check: never …` stands on a line of its own"),
        ("if A:  # values: same", "`# values:` stands on a line of its own"),
        ("# Check: then mm", "write `# check: then mm`"),
        ("# expect: no relu", "there is no directive `# expect:`; there are passes, check, "),
        ("# Expect: no relu", "there is no directive `# Expect:`; there are passes, check, "),
        ("# unchanged: result", "there is no directive `# unchanged:`; there are "),
        ("# unchanged: result", "result: unchanged"),
        ("# result unchanged", "write `# result: unchanged`"),
        ("# again = unchanged", "write `# again: unchanged`"),
        ("# values same.", "write `# values: same"),
        ("## values: same", "write `# values: same`"),
        ("# * again: unchanged", "write `# again: unchanged`"),
        ("# golden full", "write `# golden: full`"),
        ("# passes canonicalize_graph_pass", "write `# passes: canonicalize_graph_pass`"),
        ("# raises PlanError: words", "write `# raises: PlanError: words`"),
        ("# world fake 2", "write `# world: fake 2`"),
        ("# mesh fsdp=2", "write `# mesh: fsdp=2`"),
        ("# value: same", "there is no directive `# value:`, did you mean `values`?"),
        ("# values: equal", "or `# values: rounds elsewhere`, found 'equal'"),
        ("# again: same", "expected `# again: unchanged`, found 'same'"),
        ("# raises:", "`# raises:` says nothing"),
        ("# world: ranks 8", "expected a world like `fake 8` or `fake 8, rank 3`, found 'ranks 8'"),
        ("# world: fake 8, rank 8", "gt_world's rank lies in 0..7; not 8"),
        ("# mesh: fsdp=8", "a mesh needs its world, such as `# world: fake 8`"),
        ("# world: fake 8\n# mesh: fsdp 8", "expected a mesh like `fsdp=4, tp=2`, found 'fsdp 8'"),
        (
            "# world: fake 8\n# mesh: tp=2, tp=8",
            "the mesh has 'tp' twice, name each dimension once",
        ),
        ("# world: fake 8\n# mesh: fsdp=4", "multiplies to 4, but its size is 8"),
        ("# world: fake 8\n# world: fake 8", "there is a `# world:` at a.fxgraph:3 already"),
        (
            "# passes: canonicalise_graph_pass",
            "no pass is called 'canonicalise_graph_pass', did you mean `canoni",
        ),
        (
            "# passes: data_parallel",
            "no pass is called 'data_parallel'; there are canonicalize_graph_pass, ",
        ),
        ("# passes: a_pass(", "'(' was never closed: a_pass("),
        ("# passes: a_pass # b_pass", "a directive has no comment after it: a_pass # b_pass"),
        ("# passes: a_pass;", "a pass is missing at the end: a_pass;"),
        ("# passes:", "a pass is missing at the end"),
        ("# passes: a_pass;\n#   b_pass(x=3)", "a directive is one line"),
        ("# passes: a_pass\n# ; b_pass", "a directive is one line"),
        ("# passes: a_pass\n# and b_pass", "a directive is one line"),
        ("# passes: a_pass\n  # b_pass", "a directive is one line"),
        ("# check: then neg\n#   -> bf16 in bwd", "a directive is one line"),
        ("# check: then neg\n# -> bf16 in bwd", "a directive is one line"),
        ("# check: then neg\n#\tin bwd", "a directive is one line"),
        ("# raises: words\n#     and more", "a directive is one line"),
        ("# raises PlanError", "write `# raises: PlanError`"),
        ("# checks never relu", "write `# check: never relu`"),
        ("# Expect never relu.", "write `# check: never relu`"),
        ("# never relu!", "write `# check: never relu"),
        ("# Never relu.", "write `# check: never relu"),
        ("#: check: never relu", "write `# check: never relu`"),
        ("# @check: never relu", "write `# check: never relu`"),
        ("# `check: never relu`", "write `# check: never relu`"),
        ("# passes: a_pass(1)", "expected passes like `a_pass; b_pass(option=2)`, found a_pass(1)"),
        ("# passes: os.remove(path='x')", "expected passes like `a_pass; b_pass(option=2)`"),
        (
            "# passes: a_pass(n=open('x'))",
            "an option is a literal of Python, and n=open('x') is not",
        ),
        (
            "# passes: a_pass(**{'n': print()})",
            "write each option with its name, `n=2`, and not as **{'n': print()}",
        ),
        ("# passes: a_pass(**{})", "write each option with its name, `n=2`, and not as **{}"),
        ("# passes: a_pass(**{'n': 1})", "and not as **{'n': 1}"),
        ("# passes: a_pass(m=1, **{1: 2})", "and not as **{1: 2}"),
        ("# passes: a_pass(n={[]: 1})", "an option is a literal of Python, and n={[]: 1} is not"),
        (
            "# passes: canonicalize_graph_pass(rule=1)",
            "canonicalize_graph_pass: got an unexpected keyword argument 'rule'",
        ),
        ("# raises: e", "'e' may be in any message: write the class of the error, or words of its"),
        ("# raises: an", "'an' may be in any message"),
        ("# raises: ...", "'...' may be in any message"),
        ("# raises: 1234", "'1234' may be in any message"),
    ],
)
def test_lines_that_are_refused(write, line, words):
    message = error_of(write(line, "# check: then neg"))
    assert message.startswith("a.fxgraph:")
    assert words in message


@pytest.mark.parametrize(
    "line",
    [
        "# then descend. The embedding stays gathered.",
        "# never mm, as the parameter is gathered",
        "# next the layers: each has one",
        "# count the gathers of each layer",
        "# values stay, and so does the order",
        "# result of a collective or product of two parameters",
        "# golden numbers come from eager",
        "# passes that nobody asked for",
        "# world of two ranks",
        "# raises no error: the plan covers it",
        "# D4: offsets",
        "# TODO: a second layer",
        "# note: a gather of the backward is no duplicate",
        "# would help nobody; the message says how: rename it",
        "# view: schedule",
        "#",
        "# ------",
        "## the second layer",
        "# raises PlanError in a later step",
        "# expect the gathers to stay",
        "# check: then detach\n# a word on it\n#   and more of it",
        "# check: then detach\n\n#   a drawing",
        "# check: then detach\n#",
        "# (for the reader) and so on",
    ],
)
def test_comments_for_the_reader(write, line):
    assert read_pass_file(write(line, "# check: then neg")).checks[-1].value == "then neg"


def test_a_file_without_passes_or_without_text(write, tmp_path):
    assert error_of(write("# check: then neg", passes="")).startswith(
        "a.fxgraph names no pass: add a line like"
    )
    assert error_of(tmp_path / "none.fxgraph").startswith("none.fxgraph cannot be read: ")
    (tmp_path / "bytes.fxgraph").write_bytes(b"\xff\xfe")
    assert error_of(tmp_path / "bytes.fxgraph").startswith("bytes.fxgraph cannot be read: 'utf-8'")


def test_text_that_is_no_graph_keeps_its_line(write):
    assert error_of(write("# check: then neg", body="if P:\n  P.w: f33[2]\n")).startswith(
        "a.fxgraph, line 5"
    )


def test_a_check_that_cannot_be_read_names_its_line(write):
    with pytest.raises(CheckError, match=r"^a\.fxgraph:3: then neg fwd\n"):
        run_pass_file(write("# check: then neg fwd"))


def test_values_need_inputs_of_known_sizes(write):
    body = (
        "s0 = size(4)\nif I:\n  I.x: f32[s0]\nif fwd:\n  neg: f32[s0] = aten.neg(I.x)\n"
        "if out:\n  yield fwd._.neg\n"
    )
    assert "`# values:` needs inputs that are tensors of known sizes" in error_of(
        write("# values: same", "# check: then neg", body=body)
    )


def test_a_folder_without_files_is_an_error(tmp_path):
    with pytest.raises(PassFileError, match=r"there is no \*.fxgraph file below"):
        pass_files(tmp_path)


def test_files_of_any_case_and_in_linked_folders_are_found(tmp_path):
    """A file that is left out would be a test that nobody misses."""
    graphs, elsewhere = tmp_path / "graphs", tmp_path / "elsewhere"
    for folder in (graphs / "a", elsewhere / "deep"):
        folder.mkdir(parents=True)
    for file in (graphs / "a/x.FXGRAPH", graphs / "y.fxgraph", elsewhere / "deep/z.FxGraph"):
        file.write_text("# gtrainer graph v2\n")
    (graphs / "linked").symlink_to(elsewhere)
    (graphs / "a/up").symlink_to(graphs)  # a circle
    (graphs / "w.fxgraph").symlink_to(graphs / "y.fxgraph")
    (graphs / "broken.fxgraph").symlink_to(graphs / "nothing")
    assert [parameter.id for parameter in pass_files(graphs)] == [
        "a.x",
        "broken",
        "linked.deep.z",
        "w",
        "y",
    ]


@pytest.mark.parametrize(
    ("head", "world"),
    [
        (["# world: fake 8, rank 3"], {"size": 8, "mesh": {"fsdp": 8}, "rank": 3}),
        (["# world: fake 4"], {"size": 4, "mesh": {"fsdp": 4}, "rank": 0}),
        (
            ["# world: fake, 8 ranks, rank 7", "# mesh: fsdp=4, ep=2"],
            {"size": 8, "mesh": {"fsdp": 4, "ep": 2}, "rank": 7},
        ),
        ([], None),
        (["# world: fake 8, rank 8"], None),  # the test of the file reports it
    ],
    ids=["a rank", "the first", "the last of a mesh", "no world", "no such rank"],
)
def test_a_parameter_has_the_marker_of_its_files_world(tmp_path, head, world):
    lines = ["# gtrainer graph v2", *head, "# passes: canonicalize_graph_pass", ""]
    (tmp_path / "a.fxgraph").write_text("\n".join(lines))
    (found,) = pass_files(tmp_path)
    assert [(mark.name, mark.args, mark.kwargs) for mark in found.marks] == (
        [("gt_world", ("fake",), world)] if world else []
    )


def test_the_kinds_of_checks_are_those_of_the_checker():
    """Pass files are read without torch, so the kinds stand in two places."""
    assert pass_file._KINDS_OF_CHECK == predicates.KINDS
