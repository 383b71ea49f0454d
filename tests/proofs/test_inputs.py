"""Inputs of proofs: drawn or given, refused in a sentence, and left as they were."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import assert_same_model, prove
from pytest_gtrainer.arithmetic.base import NoMeaning
from pytest_gtrainer.proofs.inputs import draw_inputs

F = nn.functional
X = torch.arange(12.0).view(3, 4) + 1


def graph(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


PARTS = {
    "chunks": lambda: torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).unbind(),
    "columns": lambda: torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).unbind(1),
    "overlapping": lambda: tuple(torch.arange(1.0, 7).unfold(0, 4, 1)),
    "the last ones": lambda: tuple(torch.randn(5, 4)[1:4]),
}


@pytest.mark.parametrize("parts", PARTS)
def test_parts_of_one_tensor_are_inputs_of_their_own(parts):
    """Decisions, since then real numbers do not contradict what is equal by mistake."""
    inputs = PARTS[parts]()

    def runs(x, y, z):
        return x + torch.relu(y)

    for other in (
        lambda x, y, z: x + torch.relu(z),
        lambda x, y, z: x + torch.relu(x),
        lambda x, y, z: y + torch.relu(y),
        lambda x, y, z: x + torch.relu(2 * y),
    ):
        assert prove(other, runs, inputs=inputs).kind == "another function"
    assert prove(runs, runs, inputs=inputs).kind == "identical"
    shift = prove(lambda x, y, z: y[:-1] * 1, lambda x, y, z: x[1:] * 1, inputs=inputs)
    assert shift.kind == ("identical" if parts == "overlapping" else "another function")


@pytest.mark.gt_world("simulated", size=4)
def test_chunks_of_one_tensor_are_inputs_of_their_ranks(gt_mesh, gt_world):
    c10d, group = torch.ops._c10d_functional, gt_mesh.get_group().group_name

    def of_rank(rank):
        def run(x):
            rows = c10d.wait_tensor(c10d.all_gather_into_tensor(torch.relu(x), 4, group))
            return rows.view(4, 4)[rank] * 2

        return make_fx(run)(X[0])

    inputs = [(each,) for each in torch.randn(4, 4).unbind()]
    for rank in (0, 3):
        proof = prove(of_rank(1), of_rank(rank), inputs=inputs, world=gt_world)
        assert proof.kind == "another function"


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_drawn_places_reach_both_ends_and_one_comes_twice(count):
    """A bound at either end shows, and so does what is not added up."""
    places, table = torch.zeros(count, dtype=torch.long), torch.randn(100, 2)
    plain = graph(lambda at, table: table[at], places, table)
    drawn, _ = draw_inputs(plain, seed=count)
    assert drawn.max() == 99
    if count > 1:
        assert drawn.min() == 0
    if count > 2:
        assert len(drawn.unique()) < count

    def bounded(low, high):
        return graph(lambda at, table: table[at.clamp(low, high)], places, table)

    assert prove(bounded(0, 98), plain).kind == "another function"
    if count > 1:
        assert prove(bounded(1, 99), plain).kind == "another function"


def test_places_are_drawn_below_the_extents_that_they_index():
    tokens, rows, targets = (torch.zeros(40, dtype=torch.int64) for _ in range(3))

    def look_up(table, tokens, rows, targets):
        x = F.embedding(tokens.view(4, 10).flatten(), table)[rows]
        return F.nll_loss(x, targets)

    gm = graph(look_up, torch.zeros(7, 5), tokens, rows, targets)
    _, *places = draw_inputs(gm, seed=0)
    assert [int(each.max()) for each in places] == [6, 39, 4]
    assert prove(gm, gm).kind == "identical"


@pytest.mark.parametrize("rows", [(7, 5), (5, 7), (3, 9, 6)])
def test_an_index_into_several_tables_is_drawn_below_the_smallest(rows):
    tables = [torch.zeros(count, 2) for count in rows]
    places = torch.zeros(40, dtype=torch.int64)
    gm = graph(lambda at, *tables: sum(table[at] for table in tables), places, *tables)
    drawn, *_ = draw_inputs(gm, seed=0)
    assert (int(drawn.min()), int(drawn.max())) == (0, min(rows) - 1)


@pytest.mark.parametrize(
    ("function", "inputs", "complaint"),
    [
        (
            lambda x, n: x * n,
            (X, torch.ones(4, dtype=torch.int64)),
            "arg|n_1.*is no index of anything",
        ),
        (lambda x: torch.view_as_complex(x.view(3, 2, 2)).abs(), (X,), ""),
    ],
    ids=["an integer without a range", "complex"],
)
def test_an_input_that_nobody_can_make_up_is_refused(function, inputs, complaint):
    gm = graph(function, *inputs)
    if complaint:
        with pytest.raises(ValueError, match=complaint):
            prove(gm, gm)
    else:
        proof = prove(gm, gm)
        assert proof.kind == "unknown"
        assert proof.reason.startswith("aten.abs.default of complex numbers")


def test_an_input_that_no_operator_reads_needs_no_value():
    """The mesh of a DTensor is such an input: graphs of torchtitan take and return it."""

    graphs = []
    for factor in (2, 2, 3):
        made = torch.fx.Graph()
        x, mesh = made.placeholder("x"), made.placeholder("mesh")
        scaled = made.call_function(torch.ops.aten.mul.Tensor, (x, factor))
        x.meta["val"] = scaled.meta["val"] = torch.empty(3)
        made.output((scaled, mesh))
        graphs.append(torch.fx.GraphModule(torch.nn.Module(), made))
    assert prove(graphs[0], graphs[1]).kind == "identical"
    assert prove(graphs[0], graphs[2]).kind == "another function"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "two callables: give the inputs"),
        ({"inputs": (X,), "at_least": "equal"}, "at_least='equal': take one of 'identical'"),
        ({"inputs": (X,), "world": 2}, "both programs are graphs"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        prove(torch.sin, torch.sin, **arguments)


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="'text' is no graph and cannot be called"):
        prove("text", torch.sin, inputs=(X,))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: torch.zeros(3), (X,)),
        (lambda x: x.shape[0], (X,)),
        (lambda n: n + 1, (torch.ones(3, dtype=torch.int64),)),
        (lambda x: x[:0], (X,)),
        (lambda x: (x * 2, torch.ones(2)), (torch.ones(0, 4),)),
    ],
    ids=["a constant", "a size", "whole numbers", "nothing of it", "an empty input"],
)
def test_what_depends_on_no_abstract_input_proves_nothing(function, inputs):
    proof = prove(function, function, inputs=inputs)
    assert proof.kind == "unknown"
    assert "no result depends on an abstract input" in proof.reason


def test_a_constant_beside_others_is_named():
    proof = prove(lambda x: (x * 2, torch.ones(2)), lambda x: (x * 2, torch.ones(2)), inputs=(X,))
    assert proof.kind == "identical"
    assert "output 1 depend on no abstract input" in proof.assumes[0]
    other = prove(lambda x: (x * 2, torch.ones(2)), lambda x: (x * 2, torch.zeros(2)), inputs=(X,))
    assert other.kind == "another function"


def test_a_number_that_the_program_asks_for_is_named():
    proof = prove(lambda x: x * x.sum().item(), lambda x: x * x.sum().item(), inputs=(X,))
    assert "numbers that the program reads stay what they are (1 are read)" in str(proof) or (
        "(2 are read)" in str(proof)
    )


UNSEEN = {
    "a tensor of a list": lambda x: torch.tensor(list(x)),
    "a tensor of lists": lambda x: torch.tensor([[x[0], x[1]], [x[2], x[3]]]).flatten(),
    "by its keyword": lambda x: torch.as_tensor(data=list(x)),
    "of the same dtype": lambda x: x.new_tensor(list(x)),
    "a list": lambda x: torch.tensor(x.tolist()),
    "NumPy": lambda x: torch.from_numpy(x.numpy() + 0),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_number_that_is_read_without_an_operator_is_named(name):
    read = UNSEEN[name]
    proof = prove(lambda x, w: read(x) * w, lambda x, w: w * 1, inputs=(torch.ones(4), X[0]))
    assert any("numbers that the program reads" in line for line in proof.assumes), str(proof)
    plain = prove(lambda x, w: torch.tensor([1.0] * 4) * w, lambda x, w: w * 1, inputs=(X, X[0]))
    assert not any("reads" in line for line in plain.assumes)


def test_a_comparison_of_all_numbers_is_a_read():
    def scaled(x):
        return x * float(torch.allclose(x, x))

    proof = prove(scaled, lambda x: x * 1.0, inputs=(X,))
    assert "numbers that the program reads stay what they are (1 are read)" in str(proof)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    model = nn.Linear(4, 4)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    x, state = X.clone().requires_grad_(), torch.get_rng_state()

    def run(model, x):
        model(F.dropout(x)).sum().backward()
        with torch.no_grad():
            model.weight.mul_(2)
        if fails:
            raise KeyError("mine")

    if fails:
        with pytest.raises(KeyError, match="mine"):
            prove(run, run, inputs=(model, x))
    else:
        assert prove(run, run, inputs=(model, x)).kind == "identical"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    assert model.weight.grad is None
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))


def test_one_tensor_that_is_given_twice_stays_one():
    def run(x, y):
        x.add_(1)
        return y * 2

    def wrong(x, y):
        return y * 2 + x.add_(1) * 0

    assert prove(run, run, inputs=(X, X)).kind == "identical"
    one, two = (prove(wrong, run, inputs=inputs) for inputs in ((X, X), (X, X.clone())))
    assert one.kind == "another function"
    assert two.kind in ("reordered", "rounds elsewhere")


EXPANDED = {
    "rows": lambda: torch.randn(1, 4).expand(3, 4),
    "a number": lambda: torch.randn(()).expand(4),
    "windows": lambda: torch.randn(6).unfold(0, 3, 1),
    "a part": lambda: torch.randn(2, 4)[1:].expand(3, 4),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_an_input_that_is_expanded_has_one_element_at_several_places(name):
    x = EXPANDED[name]()
    assert prove(lambda x: x * 2, lambda x: x + x, inputs=(x,)).kind == "reordered"
    assert prove(lambda x: x * 2, lambda x: x * 3, inputs=(x,)).kind == "another function"
    if name != "windows":
        same = prove(lambda x: x * 2, lambda x: x[:1].expand(x.shape) * 2, inputs=(x,))
        assert same.is_at_least("reordered")


def test_sparse_gradients_are_unknown():
    embedding = nn.Embedding(4, 3, sparse=True)

    def train(model, places):
        model(places).sum().backward()

    proof = prove(train, train, inputs=(embedding, torch.tensor([1, 2])))
    assert proof.kind == "unknown"
    assert "torch.sparse_coo" in proof.reason


def test_a_result_without_numbers_is_unknown():
    x = torch.ones(2)
    for sides in (
        (lambda x: x * 1, lambda x: (x * 1).to("meta")),
        (lambda x: (x * 1).to("meta"), lambda x: (x * 1).to("meta")),
    ):
        proof = prove(*sides, inputs=(x,))
        assert proof.kind == "unknown"
        assert "on the meta device, which holds no numbers" in proof.reason


def test_an_unknown_is_raised_by_name_outside_of_a_proof():
    assert issubclass(NoMeaning, NotImplementedError)


TRAINERS = {
    "AdamW": lambda parameters, **options: torch.optim.AdamW(parameters, lr=0.1, **options),
    "SGD": lambda parameters, **options: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, **options
    ),
}


@pytest.mark.second_tier("AdamW")
@pytest.mark.parametrize("name", TRAINERS)
def test_several_steps_with_clipping_and_an_optimiser(name):
    """Operators on lists are those on tensors; a missing step, or clipping, is another function."""

    def train(model, x, *, steps=2, clip=1.0, foreach=False):
        optimizer = TRAINERS[name](model.parameters(), foreach=foreach)
        for _ in range(steps):
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=foreach)
            optimizer.step()

    def with_options(**options):
        return lambda model, x: train(model, x, **options)

    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
    assert prove(with_options(foreach=True), train, inputs=(model, X)).kind == "identical"
    for wrong in ({"steps": 1}, {"clip": 0}, {"clip": 0.5}):
        assert prove(with_options(**wrong), train, inputs=(model, X)).kind == "another function"


def test_accumulated_gradients_are_reordered_and_a_missing_division_is_a_factor():
    def train(model, x, *, parts=1, divided=True):
        for part in x.chunk(parts):
            loss = F.mse_loss(model(part), part)
            (loss / parts if divided else loss).backward()

    model, x = nn.Linear(4, 4), torch.cat((X, X + 1))
    inputs = model, x
    assert prove(lambda m, x: train(m, x, parts=2), train, inputs=inputs).kind == "reordered"
    wrong = prove(lambda m, x: train(m, x, parts=2, divided=False), train, inputs=inputs)
    assert wrong.kind == "another function"
    assert wrong.factor == 2


def test_what_is_drawn_for_a_shape_does_not_depend_on_numbers():
    def drops(x):
        return torch.bernoulli(x, 0.5) * x

    def drops_again(x):
        torch.bernoulli(x, 0.5)
        return drops(x)

    x = torch.randn(64)
    assert prove(drops, drops, inputs=(x,)).kind == "identical"
    assert prove(drops_again, drops, inputs=(x,)).kind == "another function"
    unknown = prove(torch.bernoulli, torch.bernoulli, inputs=(torch.rand(64),))
    assert "draws random numbers that depend on abstract ones" in unknown.reason


@pytest.mark.gt_world("simulated", size=2)
def test_a_graph_that_names_only_some_of_its_results(gt_mesh, gt_world):
    def sums(x):
        c10d, group = torch.ops._c10d_functional, gt_mesh.get_group().group_name
        return x * 2, c10d.wait_tensor(c10d.all_reduce(x, "sum", group))

    gm = make_fx(sums)(X[0])
    gm.graph.output_node().meta["gt_outputs"] = ["total"]
    assert prove(gm, gm, inputs=[(X[0],), (X[1],)], world=gt_world).kind == "identical"


def all_larger(x, y):
    return x * 2 if (x > y).all() else x * 1


def above(x):
    return x * 2 if (x > 1).all() else x * 1


def test_a_branch_that_no_run_takes_is_named():
    # One side alone compares, so it is no "identical".
    proof = prove(all_larger, lambda x, y: x * 1, inputs=(X, X.flip(0)))
    assert proof.kind == "reordered"
    line = all_larger.__code__.co_firstlineno + 1
    assert f"all 9 orders take the same branch at test_inputs.py:{line}" in str(proof)
    both = prove(above, above, inputs=(X,))
    assert both.kind == "identical"
    assert "the same branch" not in str(both)


def some_limits(x, swapped):
    limits = [0.5 + place / 10 for place in range(12)]
    if swapped:
        limits[3:5] = limits[4:2:-1]
    parts = [torch.where(x > limit, place * x, 0) for place, limit in enumerate(limits)]
    return torch.stack(parts).sum(0)


OF_ALL = {
    "all": lambda x, y: torch.where((x > y).all(), x, y),
    "any of a row": lambda x, y: torch.where((x > y).any(-1, keepdim=True), y, x) - x + y,
    "a count": lambda x, y: torch.where((x > y).sum() == 24, x, y),
    "a product": lambda x, y: y + (x > y).float().prod() * x,
    "a largest place": lambda x, y: torch.where((x > y).int().argmax() == 23, x, y),
    "a number that is read": lambda x, y: x if (x > y).sum().item() == 24 else y * 1,
    "a list": lambda x, y: x if (x > y).sum().tolist() == 24 else y * 1,
    "equal": lambda x, y: x if torch.equal(x, y) else y * 1,
    "allclose": lambda x, y: x if torch.allclose(x, y) else y * 1,
    "a number that is none": lambda x, y: torch.where(x.isnan(), x, y),
    "an infinity": lambda x, y: torch.where(x.isinf().any(), x, y),
    "twelve limits": lambda x, y: y + some_limits(x[0, 0], True) - some_limits(x[0, 0], False),
}


@pytest.mark.second_tier("twelve limits", "a largest place", "a list")
@pytest.mark.parametrize("name", OF_ALL)
def test_what_depends_on_all_elements_together_is_named(name):
    """No run makes all of them larger; the other side never asks."""
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    proof = prove(OF_ALL[name], lambda x, y: y * 1, inputs=(x, y))
    named = [each for each in proof.assumes if not each.startswith("no two compared")]
    assert named or not proof.is_at_least("rounds elsewhere"), str(proof)


def test_in_a_graph_each_question_is_named_by_itself():
    def asks(x, y):
        return torch.where((x > y).all(), x, y) + torch.where((x[0, 0] > y[0, 0]).all(), x, y)

    inputs = torch.randn(4, 6), torch.randn(4, 6)
    proof = prove(make_fx(asks)(*inputs), make_fx(asks)(*inputs), inputs=inputs)
    assert "the same branch at the graph (all 1):" in str(proof)
    each = prove(lambda x, y: x.where((x > y) & (x > 0), y), lambda x, y: x, inputs=inputs)
    assert not each.is_at_least("rounds elsewhere")
    seen = prove(
        lambda x: x.where((x > 1) & (x < 2), 0),
        lambda x: x.where((x > 1) & (x < 2), 0),
        inputs=(X,),
    )
    assert "the same branch" not in str(seen)


def test_what_attention_asks_of_its_mask_is_no_question_of_the_program():
    def attend(x):
        mask = torch.arange(4) < torch.tensor([[1], [2], [3], [0]])
        x = x[None, None].requires_grad_()
        loss = F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum()
        return torch.autograd.grad(loss, x)

    proof = prove(attend, lambda x: attend(x + 0 * x), inputs=(torch.randn(4, 6),))
    assert not proof.assumes


def less(x):
    return x * 2 if x[0, 0] < x[1].sum() else x * 1


def less_by_where(x):
    return torch.where(x[0, 0] < x[1].sum(), x * 2, x * 1)


@pytest.mark.parametrize("branch", [0, 1])
@pytest.mark.parametrize("one", [less, less_by_where])
def test_neither_branch_is_missed(one, branch):
    """Also by the strongest kind, which is looked for first."""
    factors = [2, 1]
    factors[branch] = 4

    def other(x):
        return torch.where(x[0, 0] < x[1].sum(), x * factors[0], x * factors[1])

    assert prove(one, other, inputs=(X,)).kind == "another function"
    identical = prove(one, other, inputs=(X,), at_least="identical")
    assert "weaker kinds were not looked for" in identical.reason


def doubled_if(condition):
    """Return a function that doubles all elements where a condition of all of them holds."""
    return lambda x: torch.where(condition(x), 2 * x, x)


def scaled_by(chosen):
    return lambda x: x / chosen(x.abs())


ONE_LIMIT_IS_ANOTHER = {
    "any above large ones": [doubled_if(lambda x, n=n: (x > n).any()) for n in (2000, 3000)],
    "the range of a dtype": [
        doubled_if(lambda x, n=n: (x.abs() < n).all()) for n in (65504, 60000)
    ],
    "all above": [doubled_if(lambda x, n=n: (x > n).all()) for n in (0.3, 0.4)],
    "all below 0": [doubled_if(lambda x, n=n: (x < n).all()) for n in (-0.3, -0.4)],
    "the least": [doubled_if(lambda x, n=n: x.min() > n) for n in (0.3, 0.4)],
    "all within": [doubled_if(lambda x, n=n: ((x > 0) & (x < n)).all()) for n in (1, 2)],
    "none": [doubled_if(lambda x: ((x > 0) & (x < 1)).all()), lambda x: x * 1],
    "the largest size": [
        scaled_by(lambda sizes: sizes.amax()),
        scaled_by(lambda sizes: sizes.flatten()[1:].amax()),
    ],
}


@pytest.mark.parametrize("name", ONE_LIMIT_IS_ANOTHER)
def test_a_limit_of_all_elements_is_compared(name):
    """Large limits, and those that all elements of a tensor have to keep on one side of 0."""
    one, other = ONE_LIMIT_IS_ANOTHER[name]
    x = torch.randn(4, 6)
    proof = prove(one, other, inputs=(x,))
    assert proof.kind in ("another function", "unknown"), str(proof)
    assert prove(one, one, inputs=(x,)).kind == "identical"


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        (lambda x: x * 2 * 0.5, "reordered"),
        (lambda x: x / 4 * 4.0, "reordered"),
        (lambda x: x * 3 / 3, "rounds elsewhere"),
        (lambda x: x * 2 * 0.25, "another function"),
    ],
)
def test_a_power_of_two_rounds_nothing(one, kind):
    """Within the range of the dtype, of which no arithmetic knows."""
    assert prove(one, lambda x: x * 1, inputs=(torch.randn(4, 6).bfloat16(),)).kind == kind


class Holds(nn.Module):
    """Multiplies by a tensor that is a parameter, a buffer, an attribute or a constant."""

    def __init__(self, kind, number):
        super().__init__()
        self.kind, self.number = kind, number
        held = torch.tensor(number)
        if kind == "parameter":
            self.held = nn.Parameter(held)
        elif kind == "buffer":
            self.register_buffer("held", held)
        elif kind == "not persistent":
            self.register_buffer("held", held, persistent=False)
        elif kind == "attribute":
            self.held = held

    def forward(self, x):
        if self.kind == "places":
            return x[torch.tensor([0, int(self.number)])]
        return x * (torch.tensor(self.number) if self.kind == "constant" else self.held)


HELD = ["parameter", "buffer", "not persistent", "attribute", "constant", "places"]


def exported(kind, number, decomposed=False):
    program = torch.export.export(Holds(kind, number), (X,))
    return program.run_decompositions() if decomposed else program


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("kind", HELD)
def test_exported_programs_hold_their_tensors(kind, decomposed):
    """They are equal to a program, and to the module, with the same ones alone."""
    program = exported(kind, 2.0, decomposed)
    assert prove(exported(kind, 2.0), program).kind == "identical"
    assert prove(program, Holds(kind, 2.0), inputs=(X,)).kind == "identical"
    assert prove(exported(kind, 1.0), program).kind in ("another function", "unknown")
    wrong = prove(program, Holds(kind, 1.0), inputs=(X,))
    assert wrong.kind in ("another function", "unknown")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_a_graph_takes_of_its_model_is_named_in_a_proof():
    """An exported graph, one of Dynamo, and an exported program with gradients take such."""
    from torch.export.experimental import _export_forward_backward

    made = []
    for kind in ("attribute", "buffer"):
        torch._dynamo.reset()
        torch.compile(Holds(kind, 2.0), backend=lambda gm, _: made.append(gm) or gm)(X)

    class Loss(Holds):
        def forward(self, x):
            return (super().forward(x) * self.weight).sum()

    loss = Loss("buffer", 2.0)
    loss.weight = nn.Parameter(torch.ones(()))
    made.append(_export_forward_backward(torch.export.export(loss, (X,))))
    for graph_of_model in made:
        assumed = " ".join(prove(graph_of_model, graph_of_model).assumes)
        assert "what each side held is not compared" in assumed
        names = assumed.rpartition("(")[2]
        assert "held" in names
        assert "weight" not in names
    assert not prove(graph(torch.relu, X), graph(torch.relu, X)).assumes


@pytest.mark.parametrize("given", [(), (X,), (X, X, X)])
def test_another_number_of_inputs_than_a_graph_takes_is_refused(given):
    """Also where one of two graphs takes another number."""
    both = graph(torch.add, X, X)
    with pytest.raises(ValueError, match=rf"a graph takes 2 inputs .*, and {len(given)} are given"):
        prove(both, both, inputs=given)
    with pytest.raises(ValueError, match=r"a graph takes 1 input .*, and 2 are given"):
        prove(graph(torch.relu, X), both)


SIZED = {
    "unique": lambda x: x.sign().unique(),
    "unique in sorted rows": lambda x: x.sign().reshape(6, 4).unique(dim=0),
    "unique_consecutive": lambda x: x.sign().unique_consecutive(),
    "rank of a matrix": lambda x: torch.linalg.lstsq(x.reshape(6, 4), x.reshape(6, 4))[1],
}


@pytest.mark.parametrize("name", SIZED)
def test_a_size_that_depends_on_abstract_numbers_is_a_number_that_is_read(name):
    made = SIZED[name]
    x, y = torch.randn(24), torch.randn(3)
    count = made(x).numel()
    proof = prove(lambda x, y: y * made(x).numel(), lambda x, y: y * count, inputs=(x, y))
    assert "numbers that the program reads stay what they are (1 are read)" in proof.assumes


@pytest.mark.parametrize("name", ["nonzero", "argwhere", "nonzero of a tuple"])
def test_how_many_numbers_are_not_zero_is_decided_in_all_orders(name):
    made = {
        "nonzero": torch.nonzero,
        "argwhere": torch.argwhere,
        "nonzero of a tuple": lambda x: x.nonzero(as_tuple=True)[0],
    }[name]
    x, y = torch.randn(24), torch.randn(3)
    count = len(made(x.relu()))
    found = prove(lambda x, y: y * len(made(x.relu())), lambda x, y: y * count, inputs=(x, y))
    assert found.kind == "another function"
    found = prove(
        lambda x, y: y * len(made(x.relu())), lambda x, y: y * (x > 0).sum(), inputs=(x, y)
    )
    assert found.kind not in ("another function", "unknown")


def test_every_operator_whose_size_depends_on_numbers_is_known():
    """A new one needs a decision: are its sizes read off the present numbers, or off a mask?"""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space == "aten" and hasattr(torch.ops.aten, base):
            operator = getattr(getattr(torch.ops.aten, base), overload or "default", None)
            if operator and torch.Tag.dynamic_output_shape in operator.tags:
                found.add(base)
    by_masks, decided = {"index", "masked_select"}, {"argwhere", "nonzero"}
    of_integers = {"_ctc_loss", "bincount", "one_hot", "repeat_interleave"}
    unique = {"_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive"}
    assert found == by_masks | decided | of_integers | unique | {"linalg_lstsq"}


@pytest.mark.parametrize("name", ["map_", "apply_"])
def test_a_function_of_python_for_each_element_is_unknown(name):
    def writes(x, y):
        x = x.clone()
        return x.map_(y, lambda a, b: a + b) if name == "map_" else x.apply_(lambda a: 2 * a)

    expected = {"map_": lambda x, y: x + y, "apply_": lambda x, y: 2 * x}[name]
    proof = prove(writes, expected, inputs=(torch.randn(3), torch.randn(3)))
    assert proof.kind == "unknown"
    assert f"Tensor.{name} computes where no dispatch mode sees it" in proof.reason


GIVEN = {
    "another size": (
        torch.randn(5, 6),
        r"size \[5, 6\], and a graph was traced for torch.float32 and",
    ),
    "fewer dimensions": (torch.randn(12), r"size \[12\]"),
    "no element": (torch.randn(0, 4), r"size \[0, 4\]"),
    "a wider dtype": (X.double(), r"torch.float64 and size \[3, 4\]"),
    "whole numbers": (X.long(), "torch.int64"),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("place", [0, 1])
def test_inputs_of_another_kind_than_the_trace_are_refused(given, place):
    """A mean that was traced as a product is one for its own size alone."""
    traced = graph(lambda x, y: (x * y).sum() / 12, X, X)
    value, said = GIVEN[given]
    inputs = [X, X]
    inputs[place] = value
    with pytest.raises(ValueError, match=f"input [xy]_1 is a tensor of .*{said}"):
        prove(traced, traced, inputs=inputs)
    assert prove(traced, traced, inputs=[X, X]).kind == "identical"


@pytest.mark.parametrize("at_first", [True, False])
def test_graphs_of_other_dtypes_take_no_input_together(at_first):
    """Both would run in the dtype of one, and the roundings of the other would be lost."""
    graphs = [graph(lambda x: (x * 2).sum(), each) for each in (X, X.bfloat16())]
    if not at_first:
        graphs.reverse()
    with pytest.raises(ValueError, match=r"traced for torch.(bfloat16|float32)"):
        prove(*graphs)


WITHOUT_NUMBERS = {"fake ones": FakeTensorMode, "on the meta device": lambda: torch.device("meta")}


@pytest.mark.parametrize("kind", WITHOUT_NUMBERS)
def test_a_proof_where_new_tensors_hold_no_numbers_is_refused(kind):
    x = torch.randn(4)
    with WITHOUT_NUMBERS[kind](), pytest.raises(ValueError, match=f"new tensors are {kind}"):
        prove(lambda x: x * 2, lambda x: x + x, inputs=(x,))
    with WITHOUT_NUMBERS[kind](), pytest.raises(ValueError, match=f"new tensors are {kind}"):
        assert_same_model(lambda mesh: None, nn.ReLU, lambda model, x: x, lambda at: (x,))
