"""Parts of ``reduce`` and ``fuzz`` by themselves: sizes, texts, files, oracles, limits."""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

from pytest_gtrainer import graphtext
from pytest_gtrainer.attack import command, fuzz, oracles
from pytest_gtrainer.attack.extract import (
    can_be_input,
    computed,
    extract,
    inputs_of,
    results_of,
)
from pytest_gtrainer.attack.fuzz import Fuzzer
from pytest_gtrainer.attack.models import ModelError, graphs_of, load_model, loss_of_all
from pytest_gtrainer.attack.oracles import (
    Failure,
    by_command,
    check_kind,
    load_named,
    load_pass,
    world_of,
)
from pytest_gtrainer.attack.reduce import Reduction, minimize, pass_file, spell, write_whole
from pytest_gtrainer.attack.sizes import resize, sizes_in, with_ranks

aten = torch.ops.aten
HEAD = "# gtrainer graph v2\n"
GRAPH = """if I:
  I[0]: f32[6, 4]
  I[1]: f32[1, 4]
if fwd:
  with _:
    total: f32[6, 1] = aten.sum.dim_IntList(I[0], [1], True)
    expand: f32[6, 4] = aten.expand(I[1], [6, 4])
    add: f32[6, 4] = aten.add.Tensor(expand, I[0], alpha=6)
    view: f32[24] = aten.view(add, [24])
if out:
  out[0] = total
  out[1] = view
"""


def graph(text=GRAPH):
    return graphtext.parse(HEAD + text)


def test_sizes_come_largest_first_and_without_one():
    assert sizes_in(graph()) == [24, 6, 4]
    assert sizes_in(graph(GRAPH.replace("6, 4", "2, 3").replace("24", "6"))) == [6, 4, 3, 2]


def test_sizes_are_changed_in_inputs_arguments_and_keyword_arguments_and_no_flag():
    changed = {6: 2, 24: 8, 1: 1}
    gm = resize(graph(), lambda size: changed.get(size, size))
    by_name = {node.name: node for node in gm.graph.nodes}
    shapes = [list(node.meta["val"].shape) for node in computed(gm)]
    assert shapes == [[2, 1], [2, 4], [2, 4], [8]]
    assert by_name["total"].args[1:] == ([1], True)
    assert type(by_name["total"].args[2]) is bool
    assert by_name["add"].kwargs == {"alpha": 2}
    assert [list(value.shape) for value in inputs_of(gm)] == [[2, 4], [1, 4]]
    with pytest.raises(RuntimeError):
        resize(graph(), lambda size: 5 if size == 6 else size)
    text = spell(gm, "")
    assert graphtext.render(graphtext.parse(text)) == text


@pytest.mark.parametrize("ranks", [4, 8])
def test_fewer_ranks_are_written_into_world_mesh_and_groups_of_all(ranks):
    text = (
        f"# gtrainer graph v2\n# world: fake {ranks}, rank 1\n# mesh: dp={ranks}, tp={ranks}0\n"
        f"# note: {ranks}\n\ndp = group(range(0, {ranks}))\ntp = group([0, 1])\nif out:\n"
    )
    made = with_ranks(text, ranks, 2)
    assert made.splitlines()[:3] == [
        *("# gtrainer graph v2", "# world: fake 2, rank 1", f"# mesh: dp=2, tp={ranks}0"),
    ]
    assert "dp = group(range(0, 2))\ntp = group([0, 1])\nif out:" in made
    assert "note" not in made


def test_a_pass_file_says_where_it_is_from_and_what_it_is_for():
    text = f"{HEAD}# world: simulated(4 ranks)\n# mesh: dp=4\n\n{GRAPH}"
    made = pass_file(text, "found\n by  x", "my_pass", "identical")
    head = [line for line in made.splitlines() if line.startswith("#")]
    assert head == [
        "# gtrainer graph v2",
        "# note: found by x",
        "# world: fake 4",
        "# mesh: dp=4",
        "# passes: my_pass",
        "# values: identical",
        "# golden: none",
    ]
    assert made.endswith(GRAPH)
    made = pass_file(f"{HEAD}\n{GRAPH}", "n")
    assert [line for line in made.splitlines() if line.startswith("#")] == head[:1] + ["# note: n"]
    assert "# world: any\n" in pass_file(f"{HEAD}# world: any\n\n{GRAPH}", "n")


def test_the_world_of_a_text_is_kept_only_where_it_has_groups():
    like = f"{HEAD}# world: fake 4\n# mesh: dp=4\n# note: x\n\n"
    assert spell(graph(), like).splitlines()[0] == "# gtrainer graph v2"
    assert "world" not in spell(graph(), like)


def test_a_file_is_written_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.fxgraph"
    write_whole(path, "old")
    write_whole(path, "né")
    assert path.read_text(encoding="utf-8") == "né"
    assert list(tmp_path.iterdir()) == [path]
    # Another run may write the same file at the same time.
    (tmp_path / "a.fxgraph.tmp").mkdir()
    write_whole(path, "né")

    def interrupted(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "né"


@hypothesis.given(st.lists(st.integers(0, 9), max_size=12), st.sets(st.integers(0, 9), max_size=4))
@hypothesis.example([1, 2, 3], {1})
@hypothesis.example([1, 2, 3, 4, 5], {2, 4})
@hypothesis.settings(deadline=None, max_examples=30)
def test_a_minimal_part_fails_in_order_and_none_of_it_can_go(items, needed):
    needed &= set(items)

    def fails(part):
        rest = iter(items)
        assert part
        assert all(each in rest for each in part)  # in order
        return needed <= set(part)

    kept = minimize(items, fails)
    if needed:
        assert Counter(kept) == Counter(needed)
    else:  # any item fails by itself
        assert len(kept) == min(len(items), 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_extents_become_as_small_as_they_still_fail(size):
    """One, two, three, and then half: the first that fails is taken."""
    text = HEAD + "if I:\n  I[0]: f32[9, 9]\nif fwd:\n  with _:\n"
    text += "    a: f32[9, 9] = aten.neg(I[0])\nif out:\n  out[0] = a\n"

    def judge(text):
        found = re.search(r"neg: f32\[(\d+), (\d+)\]|a: f32\[(\d+), (\d+)\]", text)
        if found is None:
            return None
        sizes = {int(each) for each in found.groups() if each}
        return Failure("x", "y") if sizes <= set(range(size, 10)) else None

    reduction = Reduction(spell(graphtext.parse(text), ""), Failure("x", "y"), judge, print, print)
    reduction.run()
    assert f"f32[{size}, {size}]" in reduction.text
    assert reduction.other is None


def test_a_reduction_judges_each_text_once_and_keeps_the_kind():
    kinds = {"b": "k", "cc": "other", "d": "unknown", "e": None, "f": "not proven", "ccc": "other"}
    judged, accepted = [], []

    def judge(text):
        judged.append(text)
        return kinds[text] and Failure(kinds[text], f"words of {text}")

    reduction = Reduction("a", Failure("k", "first"), judge, accepted.append, print)
    tried = [reduction._try_text(text) for text in ("d", "ccc", "cc", "e", "f", "b", "b", "cc")]
    assert tried == [False, False, False, False, False, True, False, False]
    assert judged == ["d", "ccc", "cc", "e", "f", "b"]
    assert (reduction.text, reduction.failure.words, reduction.tried) == ("b", "words of b", 6)
    assert accepted == ["b"]
    assert reduction.other == ("cc", Failure("other", "words of cc"))


@pytest.mark.parametrize(
    ("ranks", "fails_with", "tried"), [(8, 99, [2, 4]), (8, 4, [2, 4]), (16, 2, [2]), (2, 99, [])]
)
def test_ranks_are_halved_as_long_as_the_fewest_do_not_fail(monkeypatch, ranks, fails_with, tried):
    """A number of ranks has to divide sizes, so it doubles."""
    asked = []

    def try_ranks(self, given, fewer):
        asked.append(fewer)
        return fewer == fails_with

    monkeypatch.setattr(Reduction, "_reduce", lambda self: None)
    monkeypatch.setattr(Reduction, "_try_ranks", try_ranks)
    text = f"{HEAD}# world: fake {ranks}\n"
    Reduction(text, Failure("k", "w"), print, print, print).run()
    assert asked == tried


@pytest.mark.parametrize(
    ("shell", "failure"),
    [
        ("true", None),
        ("exit 3 #", Failure("exit status 3", "exit status 3")),
        ("echo; echo a; exit 1 #", Failure("exit status 1", "a")),
        (
            "echo 'E   x.FirstError: a'; echo 'E   y.LastError: b'; echo end; exit 1 #",
            Failure("exit status 1, LastError", "E   y.LastError: b"),
        ),
        ("echo Extra; echo last; exit 2 #", Failure("exit status 2", "last")),
        (
            "echo torch.a.MyException; exit 2 #",
            Failure("exit status 2, MyException", "torch.a.MyException"),
        ),
        ("test {} = 'x y'", Failure("exit status 1", "exit status 1")),
        ("grep -q text", None),
        ("sleep 9 #", Failure("timeout", "no end within 0.5 s")),
    ],
)
def test_a_command_judges_by_its_status_and_names_the_last_error(tmp_path, shell, failure):
    folder = tmp_path / "a b"
    folder.mkdir()
    assert by_command(shell, folder, 0.5 if "sleep" in shell else 60)("text") == failure
    assert (folder / "candidate.fxgraph").read_text() == "text"


@pytest.mark.parametrize(("shell", "status"), [("no-such-command-x", 127), ("/dev/null", 126)])
def test_a_command_that_cannot_run_judges_nothing(tmp_path, shell, status):
    with pytest.raises(ValueError, match=f"^--test='{shell}': "):
        by_command(shell, tmp_path, 60)("text")


NAMES = {"a_pass": lambda gm, inputs=None: gm, "number": 3, "inner": argparse.Namespace(x=len)}


@pytest.fixture
def module(monkeypatch):
    made = type(sys)("own_module_of_names")
    vars(made).update(NAMES)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{}", "--o={}: expected module:name, as an:example"),
        ("{}:", "--o={}:: expected module:name, as an:example"),
        (":x", "--o=:x: Empty module name"),
        ("no_such_x:y", "--o=no_such_x:y: No module named 'no_such_x'"),
        ("{}:nobody", "--o={}:nobody: module '{}' has no attribute 'nobody'"),
        ("{}:inner.y", "--o={}:inner.y: 'Namespace' object has no attribute 'y'"),
    ],
)
def test_a_name_that_is_none_is_one_sentence(module, path, words):
    with pytest.raises(ValueError) as caught:
        load_named(path.format(module, module), "--o", "an:example")
    assert str(caught.value) == words.format(module, module)


def test_names_are_looked_up_part_by_part(module):
    assert load_named(f"{module}:inner.x", "--o", "") is len
    with pytest.raises(ValueError) as caught:
        load_pass(f"{module}:number")
    words = f"--proof={module}:number: number is of type int, not a pass"
    assert str(caught.value) == words
    with pytest.raises(ValueError, match=r"^--gt-model=.*:number is of type int, not a function"):
        load_model(f"{module}:number")
    assert load_pass(f"{module}:a_pass")("gm", ()) == "gm"


def test_kinds_of_equal_are_all_named():
    words = "--at-least=x: the kinds are identical, other kernels, reordered, rounds elsewhere"
    with pytest.raises(ValueError) as caught:
        check_kind("x")
    assert str(caught.value).startswith(words)
    for kind in ("identical", "other kernels", "reordered", "rounds elsewhere"):
        check_kind(kind)


@pytest.mark.parametrize(
    ("head", "size"),
    [
        ("", 0),
        ("# world: fake 3\n", 3),
        ("# world: fake 4, rank 1\n# mesh: dp=4\n", 4),
        ("# mesh: dp=2, tp=3\n", 6),
        ("# world: any\n", 0),
    ],
)
def test_the_world_of_a_header_is_up_and_then_gone(head, size):
    with world_of(f"{HEAD}{head}") as found:
        assert found == size
        assert torch.distributed.is_initialized() == bool(size)
        if size:
            assert torch.distributed.get_world_size() == size
            with world_of(f"{HEAD}# world: fake 9\n") as again:
                assert again == size
    assert not torch.distributed.is_initialized()


def numbers(**changed):
    given = {"minutes": 1.0, "nodes": 60, "failures": 3, "timeout": 60.0, "ranks": 0}
    given |= {"models": False, "gt_model": None}
    return argparse.Namespace(**given | changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *(
            ({name: value}, f"--{name}={value}: give a number above 0")
            for name in ("minutes", "nodes", "failures")
            for value in (0, -1, float("nan"))
        ),
        *(
            ({"timeout": value}, f"--timeout={value}: give seconds above 0")
            for value in (0, -1.0, float("nan"), float("inf"))
        ),
        *(
            ({"ranks": value}, f"--ranks={value}: give 2 or more, or 0 for graphs of one rank")
            for value in (-2, -1, 1)
        ),
        *(
            (
                {"models": True, "ranks": value},
                f"--models --ranks={value}: give an even number, as layers and experts of these "
                "models are divided among two ranks",
            )
            for value in (3, 9)
        ),
    ],
)
def test_numbers_with_which_nothing_would_be_tried(changed, words):
    command._check_numbers(numbers())
    command._check_numbers(numbers(ranks=2, minutes=0.1, nodes=1, failures=1))
    for ranks in (0, 2, 6):
        command._check_numbers(numbers(models=True, ranks=ranks))
    with pytest.raises(command.UsageError) as caught:
        command._check_numbers(numbers(**changed))
    assert str(caught.value) == words


def fuzzer(tmp_path, a_pass, notes=None, **how):
    note = print if notes is None else notes.append
    return Fuzzer(a_pass, "a_pass", "identical", 0, tmp_path, note, **how)


def raising(error):
    def a_pass(gm, inputs):
        raise error

    return a_pass


def changing(gm, inputs):
    gm.graph.call_function(aten.neg.default, (next(iter(gm.graph.nodes)),))
    return gm


@pytest.mark.parametrize(
    ("a_pass", "judged", "counts"),
    [
        (lambda gm, inputs: gm, None, (0, {}, {}, [])),
        (raising(ValueError("no\nmore")), None, (0, {"no": 1}, {}, [])),
        (raising(NotImplementedError("not")), None, (0, {"not": 1}, {}, [])),
        (raising(KeyError("k")), None, (1, {}, {}, ["KeyError: the pass raises KeyError: 'k'"])),
        (raising(SystemExit(0)), None, (1, {}, {}, ["SystemExit: the pass raises SystemExit: 0"])),
        (changing, None, (1, {}, {}, [])),
        (changing, Failure("unknown", "why"), (1, {}, {"why": 1}, [])),
        (changing, Failure("not proven", "why"), (1, {}, {"why": 1}, [])),
        (changing, Failure("another function", "w"), (1, {}, {}, ["another function: w"])),
    ],
)
def test_what_a_pass_does_to_one_graph_is_counted(tmp_path, monkeypatch, a_pass, judged, counts):
    made = fuzzer(tmp_path, a_pass)
    reported = []
    monkeypatch.setattr(fuzz, "judge_graphs", lambda *given: judged)
    monkeypatch.setattr(
        Fuzzer,
        "_report",
        lambda self, *given: reported.append(f"{given[3].kind}: {given[3].words}"),
    )
    made._try(0, 5)
    assert made.tried == 1
    assert (made.changed, dict(made.refused), dict(made.unknown), reported) == counts


def test_seeds_follow_each_other_and_models_come_in_turn(tmp_path, monkeypatch):
    models = [graph(), graph(), graph()]
    drawn, clock = [], iter(range(100))

    def generate(seed, nodes, ranks, model, functional):
        drawn.append((seed, nodes, ranks, models.index(model), functional))
        return graph()

    monkeypatch.setattr(fuzz, "generate", generate)
    monkeypatch.setattr(fuzz.time, "monotonic", lambda: next(clock))
    notes = []
    made = fuzzer(tmp_path, lambda gm, inputs: gm, notes, models=models, functional=True)
    made.run(seed=4, seconds=20, nodes=7, most=1)
    assert drawn[:4] == [(seed, 7, 0, seed % 3, True) for seed in range(4, 8)]
    assert made.tried == len(drawn) > 3
    assert notes[0].startswith("3 graphs in 7 s, 0 changed, 0 failures")


def test_failures_end_a_run(tmp_path, monkeypatch):
    made = fuzzer(tmp_path, raising(KeyError("x")))

    def report(self, before, seed, nodes, failure):
        self.found[str(seed)] = tmp_path

    monkeypatch.setattr(Fuzzer, "_report", report)
    made.run(0, 60, 3, 2)
    assert (made.tried, made.changed) == (2, 2)
    assert made.state(1.4) == "2 graphs in 1 s, 2 changed, 2 failures"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "seed 50, 5 nodes, 0 ranks: it"),
        ({"models": [graph()]}, "seed 50, 5 nodes, 0 ranks, from a model: it"),
        (
            {"make_model": lambda number: graph()},
            "seed 50, 5 nodes, 0 ranks, from a model of --models: it",
        ),
        ({"functional": True}, "seed 50, 5 nodes, 0 ranks, --functional: it"),
    ],
)
def test_a_file_of_a_failure_says_what_makes_its_graph_again(tmp_path, how, words):
    made = fuzzer(tmp_path, lambda gm, inputs: gm, [], **how)
    made._report(graph(), 50, 5, Failure("KeyError", "it"))
    [path] = tmp_path.glob("*.fxgraph")
    assert f"{words}; the same graph, run again, does not fail" in path.read_text()


def test_names_of_files_are_numbered_from_the_second_on(tmp_path):
    made = fuzzer(tmp_path, None)
    for name in ("a_pass_3", "a_pass_3_2", "a_pass_3_3"):
        path = made._free_path(3)
        assert path == tmp_path / f"{name}.fxgraph"
        path.write_text("")
    assert made._free_path(4) == tmp_path / "a_pass_4.fxgraph"


def test_a_part_of_a_graph_returns_what_others_see_and_what_nobody_reads():
    gm = graph()
    total, expand, add, view = computed(gm)
    assert [node.name for node in results_of(gm)] == ["total", "view"]
    for kept, results in (
        ([total], ["total"]),
        ([expand, add], ["add"]),
        ([total, expand, add, view], ["total", "view"]),
        ([expand], ["expand"]),
    ):
        assert [node.name for node in results_of(extract(gm, kept))] == results
    gm.graph.erase_node(gm.graph.output_node())
    gm.graph.output((view,))
    gm.recompile()
    assert [node.name for node in results_of(extract(gm, [total]))] == ["total"]


class Two(nn.Module):
    def forward(self, x):
        return {"a": x * 2, "b": [x.sum().int(), x.mean()]}


def test_the_loss_of_a_model_depends_on_each_number_that_it_returns():
    x = torch.tensor([1.0, 3.0])
    assert loss_of_all(Two(), x).item() == (4 + 36) / 2 + 4
    assert loss_of_all(lambda x: x.sum(), x).item() == 4.0
    assert loss_of_all(lambda x: (x.sum(), x), x).item() == 16.0 + 5.0
    assert loss_of_all(lambda x: x[:1], x).item() == 1.0
    with pytest.raises(ModelError, match=r"^the model returns no floating-point tensor, so there"):
        loss_of_all(lambda x: x.int(), x)


def test_graphs_in_dicts_have_names_with_dots():
    made = {"a": graph(), 3: {"b": graph(), "c": {"d": graph()}}}
    assert list(graphs_of(lambda: made, "--o")) == ["a", "3.b", "3.c.d"]
    assert list(graphs_of(graph, "--o")) == [""]
    for empty in ({}, {"a": {}}):
        with pytest.raises(ModelError, match=r"^--o: it returns an empty dict: return \(model, in"):
            graphs_of(lambda empty=empty: empty, "--o")
    with pytest.raises(ModelError, match=r"^--o: it returns a model and 0 other values: return "):
        graphs_of(lambda: (nn.Linear(1, 1),), "--o")
    with pytest.raises(ModelError, match=r"^--o: no graph: KeyError: 'x'$"):
        graphs_of(lambda: {}["x"], "--o")


def test_a_step_of_ones_own_is_traced():
    def step(model, x):
        return model(x).exp().sum()

    traced = graphs_of(lambda: (nn.Linear(2, 2), torch.ones(2, 2), step), "--o")[""]
    targets = {node.target for node in traced.gm.graph.nodes}
    assert aten.exp.default in targets
    assert traced.is_step
    assert traced.plan == ()
    plain = graphs_of(lambda: (nn.Linear(2, 2), torch.ones(2, 2)), "--o")[""]
    assert aten.exp.default not in {node.target for node in plain.gm.graph.nodes}


def test_what_a_pass_is_given_when_it_is_judged():
    seen = []

    def a_pass(gm, inputs):
        seen.append([list(each.shape) for each in inputs])
        return gm

    assert oracles.by_proof(a_pass, "identical")(HEAD + GRAPH) is None
    assert seen == [[[6, 4], [1, 4]]]
    failure = oracles.by_proof(raising(OSError("a\nb")), "identical")(HEAD + GRAPH)
    assert failure == Failure("OSError", "the pass raises OSError: a")


@pytest.mark.parametrize(
    ("value", "can_be"),
    [
        *((torch.ones(1), True), (3, True), (2.0, True), (torch.SymInt(None), True)),
        *((torch.SymFloat(None), True), (None, False), ((torch.ones(1),), False), ("x", False)),
    ],
)
def test_tensors_and_numbers_can_be_inputs(value, can_be):
    node = torch.fx.Graph().placeholder("x")
    node.meta["val"] = value
    assert can_be_input(node) == can_be


def test_progress_is_said_every_two_seconds(monkeypatch):
    said, clock = [], iter([0.0, 2.5, 2.5, 4.0, 4.4, 4.5, 4.5])
    run = argparse.Namespace(_said=0.0, _say=said.append)
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    for line in "abcde":
        command._Reduce._progress(run, line)
    assert said == ["b", "e"]


@pytest.mark.parametrize(
    ("counts", "error", "status", "notes"),
    [
        ((9, 5, {}, {}, []), None, 0, []),
        ((9, 5, {}, {}, []), KeyboardInterrupt, 130, ["interrupted"]),
        ((9, 5, {}, {}, ["x"]), None, 1, []),
        ((50, 5, {}, {}, []), None, 0, []),
        ((51, 5, {}, {}, []), None, 0, ["a_pass changed only 5 of 51 graphs: a model of your own"]),
        ((9, 5, {}, {}, ["x"]), KeyboardInterrupt, 1, ["interrupted"]),
        (
            (9, 5, {"no": 3}, {"why": 2}, []),
            None,
            1,
            ["not judged, 3 times: no", "not judged, 2 times: why", "too little is proven: of 9 g"],
        ),
        (
            (20, 9, {"no": 3, "no!": 1}, {}, []),
            None,
            0,
            ["not judged, 3 times: no", "not judged, 1 times: no!"],
        ),
    ],
)
def test_the_end_of_a_run_of_fuzz(
    tmp_path, module, monkeypatch, capsys, counts, error, status, notes
):
    tried, changed, refused, unknown, found = counts
    asked = []

    def run(self, *how):
        own = (self.name, self.at_least, self.ranks, self.folder, self.functional, self.claims)
        asked.append((*own, *how))
        self.tried, self.changed = tried, changed
        self.refused, self.unknown = Counter(refused), Counter(unknown)
        self.found = dict.fromkeys(found)
        if error is not None:
            raise error

    monkeypatch.setattr(Fuzzer, "run", run)
    folder = tmp_path / "a" / "b"
    given = numbers(
        **{"command": "fuzz", "gt_pass": f"{module}:a_pass", "gt_model": None, "seed": 4},
        **{"minutes": 0.5, "failures": 2, "at_least": "identical", "folder": folder},
        **{"functional": True, "claims": "memory, cost"},
    )
    assert command.run(given) == status
    claims = ("memory", "cost")
    assert asked == [("a_pass", "identical", 0, folder, True, claims, 4, 30.0, 60, 2)]
    assert folder.is_dir()
    said = [line.removeprefix("fuzz: ") for line in capsys.readouterr().err.splitlines()]
    state = [line for line in said if line.startswith(f"{tried} graphs in ")]
    assert len(state) == 1
    rest = [line for line in said if line not in state]
    assert len(rest) == len(notes)
    for line, begin in zip(rest, notes, strict=True):
        assert line.startswith(begin)


def reduce_arguments(file, **changed):
    given = {"command": "reduce", "file": file, "proof": None, "test": "true", "timeout": 9.0}
    given |= {"output": None, "at_least": "reordered", "claims": None}
    return argparse.Namespace(**given | changed)


def test_what_is_reduced_is_known_by_file_and_question(tmp_path):
    file = tmp_path / "g.fxgraph"
    digests = set()
    for text, changed in (
        (GRAPH, {}),
        (GRAPH.replace("24", "24 "), {}),
        (GRAPH, {"test": "false"}),
        (GRAPH, {"proof": "a:b", "test": None}),
        (GRAPH, {"proof": "a:c", "test": None}),
        (GRAPH, {"proof": "a:b", "test": None, "at_least": "identical"}),
        (GRAPH, {"proof": "a:b", "test": None, "claims": "memory"}),
    ):
        file.write_text(HEAD + text)
        made = command._Reduce(reduce_arguments(file, **changed))
        digests.add(made._digest)
        assert made._output == tmp_path / "g.reduced.fxgraph"
    assert len(digests) == 7


def test_a_reduction_says_how_many_nodes_are_left_and_where(tmp_path, capsys):
    file = tmp_path / "g.fxgraph"
    file.write_text(HEAD + GRAPH)

    def judge(text):
        return Failure("kind", "words") if "aten.add" in text else Failure("kind2", "other")

    assert command._Reduce(reduce_arguments(file))._reduce(judge) == 0
    out, err = capsys.readouterr()
    output = tmp_path / "g.reduced.fxgraph"
    said = [line.removeprefix("reduce: ") for line in err.splitlines()]
    assert said[-3:] == [
        f"4 nodes are 1, in {output}",
        "kind: words",
        f"another graph fails otherwise, with kind2: it is in {tmp_path}/g.reduced.other.fxgraph",
    ]
    assert "aten.add" in out
    assert "aten.view" not in out
    assert output.read_text().startswith(HEAD + "# note: reduced from ")
    assert command._Reduce(reduce_arguments(file))._reduce(lambda text: None) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"reduce: {file} does not fail, so there is nothing to reduce"
    )
    unknown = Failure("unknown", "nobody knows")
    with pytest.raises(command.UsageError, match=r"g\.fxgraph cannot be judged: nobody knows$"):
        command._Reduce(reduce_arguments(file))._reduce(lambda text: unknown)
