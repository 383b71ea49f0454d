"""``python -m pytest_gtrainer plan``: a plan to paste, or one sentence."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from pytest_gtrainer.__main__ import main
from pytest_gtrainer.graph.suggest import SuggestedPlan, Suggestion
from pytest_gtrainer.start.model import load_model
from pytest_gtrainer.start.plan import spell

MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self, layers={layers}):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

def needs(mesh):
    return Model()

def reads():
    model = Model()
    assert model.head.weight.sum().item() < 1e9  # not on the meta device
    return model

def shared():
    model = Model()
    model.layers[1].weight = model.layers[0].weight
    return model

def exits():
    raise SystemExit(0)

class Holder:
    model = Model()

number = 1
empty = nn.Tanh
"""


@pytest.fixture
def project(make_project):
    return make_project(MODEL.format(layers=5))


@pytest.mark.parametrize("factory", ["Model", "reads", "Holder.model"])
def test_what_is_printed_is_a_plan_with_its_reasons(project, capsys, factory):
    assert main(["plan", f"{project}:{factory}"]) == 0
    text = capsys.readouterr().out
    assert text == (
        "bucket_plan = [\n"
        "    *(f\"layers.{i}\" for i in range(5)),  # 5 layers of 'layers'\n"
        '    ["embed", "head"],                   # embed.weight is head.weight: '
        "FSDP2 keeps a tied parameter in one group\n"
        "]\n"
    )
    found = {}
    exec(text, found)
    assert found["bucket_plan"] == [*(f"layers.{i}" for i in range(5)), ["embed", "head"]]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model", "'model' is no MODULE:FACTORY: say model:Model"),
        (":Model", "':Model' is no MODULE:FACTORY"),
        ("no_such_module:Model", "no_such_module cannot be imported from "),
        ("{}:nobody", "{} has no nobody"),
        ("{}:needs", "{}:needs() fails, with TypeError: needs() missing 1 required"),
        ("{}:exits", "{}:exits() fails, with SystemExit: 0"),
        ("{}:number", "{}:number is a int: name a class, function or model"),
        ("{}:MODULE", "{} has no MODULE"),
        ("{}:empty", "Tanh has no parameters: there is nothing to bucket"),
        ("{}:shared", "layers.0.weight is layers.1.weight, and one of them is in a layer"),
    ],
)
def test_what_has_no_plan_is_one_sentence(project, capsys, name, says):
    assert main(["plan", name.format(project)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"plan: {says.format(project)}")


def test_rows_of_layers_are_loops_only_where_indices_follow_each_other():
    def layer(fqn):
        return Suggestion((fqn,), True, "a layer of 'a'")

    names = [*(f"a.{i}.b" for i in (2, 3, 4, 5)), "a.7.b", "a.8.b", *map(str, range(4)), "c", "d"]
    suggested = SuggestedPlan(tuple(map(layer, names)), ("a note",))
    text = spell(suggested)
    found = {}
    exec(text, found)
    assert found["bucket_plan"] == suggested.plan == names
    assert [line.partition("#")[0].strip() for line in text.splitlines()] == [
        *("bucket_plan = [", '*(f"a.{i}.b" for i in range(2, 6)),', '"a.7.b",', '"a.8.b",'),
        *('*(f"{i}" for i in range(4)),', '"c",', '"d",', "]", ""),
    ]


LAYERS = st.builds(
    lambda before, begin, behind, number: [
        f"{before}{index}{behind}" for index in range(begin, begin + number)
    ],
    st.sampled_from(["layers.", "a.1.", "h2.", ""]),
    st.integers(0, 10),
    st.sampled_from(["", ".attn", ".mlp", ".1"]),
    st.integers(1, 6),
)


@hypothesis.given(
    st.lists(LAYERS, min_size=1, max_size=6).map(itertools.chain.from_iterable).map(list)
)
@hypothesis.example([f"layers.{i}.{name}" for i, name in enumerate(["attn", "mlp"] * 2)])
@hypothesis.example([f"a.{i}.{i}" for i in range(5)])
@hypothesis.example([f"{i}.1" for i in (9, 10, 11, 12, 12)])
@hypothesis.settings(deadline=None)
def test_a_plan_of_any_layers_is_itself_as_python(names):
    """Also with two numbers in a name, and where only what is behind the number changes."""
    suggested = SuggestedPlan(tuple(Suggestion((name,), True, "a layer") for name in names), ())
    text = spell(suggested)
    found = {}
    exec(text, found)
    assert found["bucket_plan"] == suggested.plan == names
    numbers = 0
    for line in text.splitlines()[1:-1]:
        words = line.partition("# ")[2]
        numbers += 1 if words == "a layer" else int(words.removesuffix(" layers"))
        assert words == "a layer" or int(words.removesuffix(" layers")) >= 4
    assert numbers == len(names)


def test_the_whole_text_of_a_plan():
    """Comments stand in one column, unless an entry is long; notes come last."""
    layers = [Suggestion((f"a.{i}",), True, "a layer of 'a'") for i in range(4)]
    short = Suggestion(("x", "y"), False, "before the layers")
    suggested = SuggestedPlan((short, *layers), ("first note", "second"))
    assert spell(suggested).splitlines() == [
        "bucket_plan = [",
        '    ["x", "y"],                     # before the layers',
        "    *(f\"a.{i}\" for i in range(4)),  # 4 layers of 'a'",
        "]",
        "# first note",
        "# second",
    ]
    long = Suggestion(("n" * 50,), False, "w")
    first, second = spell(SuggestedPlan((short, long))).splitlines()[1:3]
    assert first == '    ["x", "y"],' + " " * 29 + "  # before the layers"
    assert second == f'    "{"n" * 50}",  # w'
    assert spell(SuggestedPlan((long,))).splitlines()[1] == f'    "{"n" * 50}",  # w'


EXPERTS = """
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.experts = nn.Sequential(nn.Linear(2, 2))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
"""


def test_experts_have_buckets_of_their_own_on_request(make_project, capsys):
    project = make_project(EXPERTS)
    assert main(["plan", f"{project}:Model"]) == 0
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "    \"layers.0\",  # a layer of 'layers'",
        "    \"layers.1\",  # a layer of 'layers'",
        "]",
    ]
    assert main(["plan", f"{project}:Model", "--experts"]) == 0
    apart = capsys.readouterr().out.splitlines()[1:-1]
    assert [line.partition("#")[0].strip() for line in apart] == [
        *('"layers.0",', '"layers.1",', '"layers.0.experts",', '"layers.1.experts",'),
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "'' is no MODULE:FACTORY: say model:Model for the Model of model.py"),
        ("a:", "'a:' is no MODULE:FACTORY: say model:Model for the Model of model.py"),
        ("{}:Holder.nobody", "{} has no Holder.nobody"),
        ("{}:nobody.Model", "{} has no nobody.Model"),
        (
            "{}:exits",
            "{}:exits() fails, with SystemExit: 0. Name a function without arguments that returns "
            "the model",
        ),
        ("{}:int", "{}:int() gives a int, not a torch.nn.Module"),
    ],
)
def test_what_names_no_model_is_one_whole_sentence(project, capsys, name, words):
    with open(f"{project}.py", "a") as file:
        file.write("int = int\n")
    assert main(["plan", name.format(project)]) == 2
    assert capsys.readouterr().err == f"plan: {words.format(project)}\n"


@pytest.mark.parametrize(("code", "shown"), [("0", "0"), ("'no'", "'no'"), ("", "None")])
def test_a_module_that_exits_when_it_is_imported(make_project, capsys, code, shown):
    project = make_project(f"import sys\nsys.exit({code})\n")
    assert main(["plan", f"{project}:Model"]) == 2
    assert capsys.readouterr().err == (
        f"plan: importing {project} calls sys.exit({shown}): a script needs "
        'if __name__ == "__main__"\n'
    )


@pytest.mark.parametrize(
    ("factory", "device"), [("Model", "meta"), ("reads", "cpu"), ("Holder.model", "cpu")]
)
def test_a_plan_needs_no_memory_unless_the_model_reads_its_values(project, factory, device):
    model = load_model(f"{project}:{factory}")
    assert {parameter.device.type for parameter in model.parameters()} == {device}
