"""Versions of a graph are proven by the values in which they differ, and never equal for that."""

import copy
import operator
import random
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import fx

from pytest_gtrainer import graphtext
from pytest_gtrainer.attack import oracles
from pytest_gtrainer.attack.generate import generate
from pytest_gtrainer.attack.oracles import judge_graphs
from pytest_gtrainer.attack.pairs import CannotCut, cut_to_pairs
from pytest_gtrainer.proofs.prove import prove_at_once

aten = torch.ops.aten


def parse(*lines, results, inputs=("x",)):
    text = ["if I:", *(f"  I.{name}: f32[2, 3]" for name in inputs), "if fwd:", "  with _:"]
    text += [f"    {line}" for line in lines]
    text += ["if out:", *(f"  yield {result}" for result in results)]
    return graphtext.parse("\n".join(text) + "\n")


def is_equal_by_pairs(after, before):
    try:
        cut = cut_to_pairs(after, before)
    except CannotCut:
        return False
    return cut is None or prove_at_once(*cut, "reordered").is_at_least("reordered")


def test_only_what_differs_is_proven():
    before = parse(
        "exp: f32[2, 3] = aten.exp(I.x)",
        "neg: f32[2, 3] = aten.neg(exp)",
        "tanh: f32[2, 3] = aten.tanh(neg)",
        results=["fwd._.tanh"],
    )
    after = copy.deepcopy(before)
    (neg,) = after.graph.find_nodes(op="call_function", target=aten.neg.default)
    neg.target, neg.args = aten.mul.Scalar, (neg.args[0], -1)
    made, wanted = cut_to_pairs(after, before)
    for gm, target in ((made, aten.mul.Scalar), (wanted, aten.neg.default)):
        calls = gm.graph.find_nodes(op="call_function", target=target)
        assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_function", "output"]
        assert len(calls) == 1
    assert prove_at_once(made, wanted, "reordered").kind == "reordered"


def test_equal_operators_need_no_proof():
    """Also in another order."""
    lines = "exp: f32[2, 3] = aten.exp(I.x)", "sin: f32[2, 3] = aten.sin(I.x)"
    results = ["fwd._.exp", "fwd._.sin"]
    before, after = parse(*lines, results=results), parse(*lines[::-1], results=results)
    assert cut_to_pairs(after, before) is None


@pytest.mark.parametrize(
    ("lines", "others", "results"),
    [
        (  # two buffers, one of them written to, become one
            (
                "ones: f32[2, 3] = aten.ones_like(I.x)",
                "more: f32[2, 3] = aten.ones_like(I.x)",
                "sum: f32[2, 3] = aten.add_.Tensor(more, I.x)",
            ),
            (
                "ones: f32[2, 3] = aten.ones_like(I.x)",
                "sum: f32[2, 3] = aten.add_.Tensor(ones, I.x)",
            ),
            ("ones", "sum"),
        ),
        (  # a read of one of two buffers, each written to once, becomes one of the other
            (
                "ones: f32[2, 3] = aten.ones_like(I.x)",
                "more: f32[2, 3] = aten.ones_like(I.x)",
                "exp: f32[2, 3] = aten.exp(I.x)",
                "first: f32[2, 3] = aten.add_.Tensor(ones, I.x)",
                "second: f32[2, 3] = aten.add_.Tensor(more, exp)",
                "neg: f32[2, 3] = aten.neg(ones)",
            ),
            (
                "ones: f32[2, 3] = aten.ones_like(I.x)",
                "more: f32[2, 3] = aten.ones_like(I.x)",
                "exp: f32[2, 3] = aten.exp(I.x)",
                "first: f32[2, 3] = aten.add_.Tensor(ones, I.x)",
                "second: f32[2, 3] = aten.add_.Tensor(more, exp)",
                "neg: f32[2, 3] = aten.neg(more)",
            ),
            ("neg",),
        ),
        (  # a read moves over a write
            (
                "clone: f32[2, 3] = aten.clone(I.x)",
                "exp: f32[2, 3] = aten.exp(clone)",
                "add: f32[2, 3] = aten.add_.Tensor(clone, I.x)",
            ),
            (
                "clone: f32[2, 3] = aten.clone(I.x)",
                "add: f32[2, 3] = aten.add_.Tensor(clone, I.x)",
                "exp: f32[2, 3] = aten.exp(clone)",
            ),
            ("exp", "add"),
        ),
        (  # two reads, one on each side of a write, become one
            (
                "clone: f32[2, 3] = aten.clone(I.x)",
                "exp: f32[2, 3] = aten.exp(clone)",
                "add: f32[2, 3] = aten.add_.Tensor(clone, I.x)",
                "late: f32[2, 3] = aten.exp(clone)",
            ),
            (
                "clone: f32[2, 3] = aten.clone(I.x)",
                "exp: f32[2, 3] = aten.exp(clone)",
                "add: f32[2, 3] = aten.add_.Tensor(clone, I.x)",
                "late: f32[2, 3] = aten.alias(exp)",
            ),
            ("exp", "late"),
        ),
        (  # a copy of what is written to later becomes a view
            (
                "clone: f32[2, 3] = aten.clone(I.x)",
                "kept: f32[2, 3] = aten.clone(clone)",
                "add: f32[2, 3] = aten.add_.Tensor(clone, I.x)",
            ),
            (
                "clone: f32[2, 3] = aten.clone(I.x)",
                "kept: f32[2, 3] = aten.alias(clone)",
                "add: f32[2, 3] = aten.add_.Tensor(clone, I.x)",
            ),
            ("kept", "add"),
        ),
        (  # a write is gone
            ("add: f32[2, 3] = aten.add_.Tensor(I.x, I.x)",),
            ("add: f32[2, 3] = aten.add.Tensor(I.x, I.x)",),
            ("add",),
        ),
        (  # two draws become one
            ("a: f32[2, 3] = aten.rand_like(I.x)", "b: f32[2, 3] = aten.rand_like(I.x)"),
            ("a: f32[2, 3] = aten.rand_like(I.x)", "b: f32[2, 3] = aten.alias(a)"),
            ("a", "b"),
        ),
        (  # numbers of other types are others
            ("add: f32[2, 3] = aten.add.Scalar(I.x, 1)",),
            ("add: f32[2, 3] = aten.add.Scalar(I.x, 2)",),
            ("add",),
        ),
    ],
)
def test_what_is_another_function_is_not_equal(lines, others, results):
    named = [f"fwd._.{name}" for name in results]
    try:
        after = parse(*others, results=named)
    except graphtext.TextError as error:
        pytest.fail(str(error))
    before = parse(*lines, results=named)
    assert not is_equal_by_pairs(after, before)
    assert judge_graphs(after, before, "reordered", 0) is not None
    assert is_equal_by_pairs(before, copy.deepcopy(before))


@pytest.mark.parametrize(
    ("shape", "views", "is_same"),
    [
        ("2, 3", ["aten.alias(exp)", "aten.detach(one)"], True),
        ("2, 3", ["aten.slice.Tensor(exp, 1, 0, 3)", "aten.expand(one, [2, 3])"], True),
        ("2, 3", ["aten.view(exp, [2, 3])", "aten.reshape(one, [2, 3])"], True),
        ("2, 2", ["aten.t(exp)", "aten.permute(one, [1, 0])"], True),
        ("2, 2", ["aten.alias(exp)", "aten.t(one)"], False),
        ("2, 2", ["aten.t(exp)", "aten.reshape(one, [2, 2])"], False),
        ("2, 2", ["aten.alias(exp)", "aten.as_strided(one, [2, 2], [1, 1], 1)"], False),
        ("2, 2", ["aten.alias(exp)", "aten.clone(one)"], False),
    ],
)
@pytest.mark.parametrize("write", ["aten.fill_.Scalar(exp, 2)", "aten.neg(exp)"])
def test_a_view_that_changes_nothing_is_what_it_shows(shape, views, is_same, write):
    """Also of memory that is written to, before the view is read."""
    lines = [f"one: f32[{shape}] = {views[0]}", f"two: f32[{shape}] = {views[1]}"]
    lines += [f"three: f32[{shape}] = {write}", f"sin: f32[{shape}] = aten.sin(two)"]
    text = "if I:\n  I.x: f32[{0}]\nif fwd:\n  with _:\n    exp: f32[{0}] = aten.exp(I.x)\n"
    text = text.format(shape) + "\n".join(f"    {line}" for line in lines)
    before = graphtext.parse(f"{text}\nif out:\n  yield fwd._.sin\n  yield fwd._.three\n")
    after = copy.deepcopy(before)
    one, two = (node for node in after.graph.nodes if node.name in ("one", "two"))
    two.replace_all_uses_with(one.args[0])
    after.graph.erase_node(two)
    cut = ()
    with suppress(CannotCut):
        cut = cut_to_pairs(after, before)
    assert (cut is None) == is_same


def with_body(line, calls="hop.invoke_subgraph(invoke_subgraph_graph_0, 'body', exp)"):
    return graphtext.parse(
        f"""
def invoke_subgraph_graph_0():
  if A:
    A[0]: f32[2, 3]
  if fwd:
    with _:
      inside: f32[2, 3] = {line}
  if out:
    yield fwd._.inside
if I:
  I.x: f32[2, 3]
if fwd:
  with _:
    exp: f32[2, 3] = aten.exp(I.x)
    called: (f32[2, 3],) = {calls}
    neg: f32[2, 3] = aten.neg(exp)
if out:
  yield fwd._.called[0]
  yield fwd._.neg
"""
    )


@pytest.mark.parametrize(
    ("line", "other", "result"),
    [
        ("aten.neg(A[0])", "aten.neg(A[0])", "nothing to prove"),
        ("aten.neg(A[0])", "aten.mul.Scalar(A[0], -1)", "equal"),
        ("aten.neg(A[0])", "aten.sin(A[0])", "other"),
        ("aten.neg_(A[0])", "aten.neg_(A[0])", "cannot cut"),
        ("aten.rand_like(A[0])", "aten.rand_like(A[0])", "cannot cut"),
    ],
)
def test_a_call_of_a_graph_is_what_its_body_does(line, other, result):
    after, before = with_body(other), with_body(line)
    try:
        cut = cut_to_pairs(after, before)
    except CannotCut:
        found = "cannot cut"
    else:
        found = "nothing to prove"
        if cut is not None:
            is_equal = prove_at_once(*cut, "reordered").is_at_least("reordered")
            found = "equal" if is_equal else "other"
    assert found == result


def test_an_input_may_be_a_copy_of_another_one():
    """A second look knows it, one node deeper."""
    before = parse(
        "exp: f32[2, 3] = aten.exp(I.x)",
        "clone: f32[2, 3] = aten.clone(exp)",
        "sub: f32[2, 3] = aten.sub.Tensor(exp, clone)",
        results=["fwd._.sub", "fwd._.clone"],
    )
    after = copy.deepcopy(before)
    (sub,) = after.graph.find_nodes(op="call_function", target=aten.sub.Tensor)
    sub.args = (sub.args[0], sub.args[0])
    assert not is_equal_by_pairs(after, before)
    assert oracles._differ_in_equal_pairs(after, before, "reordered", 0)


def test_pairs_that_differ_are_left_to_a_proof_of_whole_graphs():
    """A relu of an exponential is the exponential, which a pair alone does not know."""
    before = parse(
        "exp: f32[2, 3] = aten.exp(I.x)",
        "relu: f32[2, 3] = aten.relu(exp)",
        "neg: f32[2, 3] = aten.neg(relu)",
        results=["fwd._.neg"],
    )
    after = copy.deepcopy(before)
    (relu,) = after.graph.find_nodes(op="call_function", target=aten.relu.default)
    relu.target = aten.abs.default
    assert not is_equal_by_pairs(after, before)


def test_a_node_behind_a_pair_has_to_run():
    """A transposed operand has the right elements, and a view of it raises."""
    before = parse(
        "clone: f32[2, 3] = aten.clone(I.x)",
        "view: f32[6] = aten.view(clone, [6])",
        results=["fwd._.view"],
    )
    after = copy.deepcopy(before)
    (clone,) = after.graph.find_nodes(op="call_function", target=aten.clone.default)
    with after.graph.inserting_before(clone):
        turned = after.graph.call_function(aten.t.default, (clone.args[0],))
        packed = after.graph.call_function(
            aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
        )
        back = after.graph.call_function(aten.t.default, (packed,))
    for node in (turned, packed, back):
        node.meta["val"] = torch.empty(2, 3) if node is back else torch.empty(3, 2)
    clone.replace_all_uses_with(back)
    after.graph.erase_node(clone)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        cut_to_pairs(after, before)
    failure = judge_graphs(after, before, "reordered", 0)
    assert failure.kind == "cannot run"


def changed_at_random(gm, dice):
    """Change one node of a copy, as a pass with a mistake might."""
    changed = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    calls = [node for node in changed.graph.nodes if node.op == "call_function"]
    node = dice.choice(calls)
    kind = dice.randrange(4)
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return changed
    alike = []
    for each in changed.graph.nodes:
        other = each.meta.get("val")
        if not isinstance(other, torch.Tensor) or not each < node:
            continue
        if (other.shape, other.dtype) == (value.shape, value.dtype):
            alike.append(each)
    if kind == 0 and alike:
        node.replace_all_uses_with(dice.choice(alike))
    elif kind == 1:
        dice.choice(calls).append(node)
    elif kind == 2 and alike and isinstance(node.args[0], fx.Node):
        node.replace_input_with(node.args[0], dice.choice(alike))
    elif isinstance(node.args[0], fx.Node) and len(node.args) == 1:
        node.target = dice.choice((aten.abs.default, aten.neg.default, aten.clone.default))
    changed.recompile()
    return changed


@pytest.mark.second_tier
@pytest.mark.parametrize("begin", [0, pytest.param(100, marks=pytest.mark.long)])
def test_no_mistake_passes_for_equal(begin, monkeypatch):
    """Whatever pairs take for equal, a proof of whole graphs does, too."""
    fast = oracles._differ_in_equal_pairs
    equal = found = 0
    for seed in range(begin, begin + 40):
        before = generate(seed, 20)
        after = changed_at_random(before, random.Random(seed))
        try:
            after.graph.lint()
        except RuntimeError:
            continue
        if not fast(after, before, "reordered", 0):
            found += 1
            continue
        equal += 1
        with monkeypatch.context() as slow:
            slow.setattr(oracles, "_differ_in_equal_pairs", lambda *args: False)
            failure = judge_graphs(after, before, "reordered", 0)
        assert failure is None or failure.kind in oracles.NOT_JUDGED, (seed, failure)
    assert equal > 5, "else nothing was compared"
    assert found > 5, "else no change was a mistake"


@pytest.mark.parametrize("reader", ["output", "draw"])
def test_what_a_node_with_a_fixed_place_reads_may_be_a_pair(reader):
    """A result, or what a draw is like, becomes the value that it was an alias of."""
    lines = ["exp: f32[2, 3] = aten.exp(I.x)", "alias: f32[2, 3] = aten.alias(exp)"]
    if reader == "draw":
        lines.append("draw: f32[2, 3] = aten.rand_like(alias)")
    results = ["fwd._.alias"] if reader == "output" else ["fwd._.exp", "fwd._.draw"]
    before = parse(*lines, results=results)
    for target, is_right in ((aten.alias.default, True), (aten.neg.default, False)):
        (alias,) = before.graph.find_nodes(op="call_function", target=aten.alias.default)
        alias.target = target
        after = copy.deepcopy(before)
        (gone,) = after.graph.find_nodes(op="call_function", target=target)
        gone.replace_all_uses_with(gone.args[0])
        after.graph.erase_node(gone)
        assert is_equal_by_pairs(after, before) is is_right


def test_memory_that_nobody_reads_may_go():
    """A pass that removes dead code leaves it out; what somebody reads is another one each time."""
    exp, unread = "exp: f32[2, 3] = aten.exp(I.x)", "empty_like: f32[2, 3] = aten.empty_like(I.x)"
    before = parse(unread, exp, results=["fwd._.exp"])
    after = parse(exp, results=["fwd._.exp"])
    assert cut_to_pairs(after, before) is None
    assert cut_to_pairs(before, after) is None
    read = parse(unread, exp, results=["fwd._.exp", "fwd._.empty_like"])
    with pytest.raises(CannotCut, match="output is another one"):
        cut_to_pairs(after, read)


def test_memory_that_is_written_to_later_is_read_as_any_equal_value():
    """The first of two equal copies is written to, behind who reads it."""
    lines = (
        "kept: f32[2, 3] = aten.clone(I.x)",
        "exp: f32[2, 3] = aten.exp(kept)",
        "other: f32[2, 3] = aten.clone(I.x)",
    )
    write, late = "add: f32[2, 3] = aten.add_.Tensor(kept, I.x)", "neg: f32[2, 3] = aten.neg({})"
    results = ["fwd._.exp", "fwd._.neg", "fwd._.add"]
    before = parse(*lines, late.format("other"), write, results=results)
    after = parse(*lines, late.format("kept"), write, results=results)
    assert cut_to_pairs(after, before) is None
    behind = parse(*lines, write, late.format("kept"), results=results)
    assert not is_equal_by_pairs(behind, before)


VIEW = "flat: f32[6] = aten.view(kept, [6])"
WRITE = "add_: f32[2, 3] = aten.add_.Tensor(kept, I.x)"
READ = "read: f32[6] = aten.neg(flat)"


@pytest.mark.parametrize(
    ("order", "is_equal"),
    [
        ((WRITE, VIEW, READ), True),
        ((VIEW, WRITE, READ), True),  # a view shows what is written after it was made
        ((VIEW, READ, WRITE), False),
    ],
)
def test_a_new_view_of_what_is_written_to_shows_what_is_there_when_it_is_read(order, is_equal):
    """As a bucketing pass makes one of each gradient; the whole graph need not be proven."""
    kept = "kept: f32[2, 3] = aten.clone(I.x)"
    before = parse(kept, WRITE, "neg: f32[2, 3] = aten.neg(kept)", results=["fwd._.neg"])
    shaped = "shaped: f32[2, 3] = aten.view(read, [2, 3])"
    after = parse(kept, *order, shaped, results=["fwd._.shaped"])
    assert is_equal_by_pairs(after, before) == is_equal


def test_a_view_that_is_read_before_and_behind_a_write_is_no_single_value():
    kept = "kept: f32[2, 3] = aten.clone(I.x)"
    late = "late: f32[6] = aten.neg(flat)"
    total = "total: f32[6] = aten.add.Tensor(read, late)"
    shaped = "shaped: f32[2, 3] = aten.view(total, [2, 3])"
    after = parse(kept, VIEW, READ, WRITE, late, total, shaped, results=["fwd._.shaped"])
    before = parse(
        kept,
        WRITE,
        "neg: f32[2, 3] = aten.neg(kept)",
        "twice: f32[2, 3] = aten.add.Tensor(neg, neg)",
        results=["fwd._.twice"],
    )
    with pytest.raises(CannotCut, match="flat is written to between its readers"):
        cut_to_pairs(after, before)


@pytest.mark.parametrize(("factor", "is_equal"), [(1, True), (2, False)])
def test_memory_is_known_by_who_writes_to_it(factor, is_equal):
    """Not by its place: others may be made before it, and the node that makes it may be another."""
    one, two = "one: f32[2, 3] = aten.clone(I.x)", "two: f32[2, 3] = aten.exp(I.x)"
    writes = (
        "add: f32[2, 3] = aten.add_.Tensor(one, I.x)",
        "mul: f32[2, 3] = aten.mul_.Tensor(two, I.x)",
    )
    results = ["fwd._.add", "fwd._.mul"]
    before = parse(one, two, *writes, results=results)
    assert cut_to_pairs(parse(two, one, *writes, results=results), before) is None

    other = f"one: f32[2, 3] = aten.mul.Scalar(I.x, {factor})"
    after = parse(two, other, *writes, results=results)
    assert is_equal_by_pairs(after, before) == is_equal


def graph_of(made):
    """Return a graph of one input; ``made`` adds nodes by a function and returns the result."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=torch.empty(4, 3), gt_input={"kind": "input", "fqn": "x"})

    def call(target, *args):
        node = graph.call_function(target, args)
        values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args]
        node.meta["val"] = target(*values)
        return node

    graph.output((made(call, x),))
    return fx.GraphModule({}, graph)


def split_neg(call, x, part=1):
    parts = call(aten.split.Tensor, x, 2, 0)
    return call(aten.neg.default, call(operator.getitem, parts, part))


def slice_neg(call, x, begin=2):
    size = call(aten.sym_size.int, x, 0)
    return call(aten.neg.default, call(aten.slice.Tensor, x, 0, begin, size))


def test_a_part_of_a_split_and_a_slice_up_to_a_size_are_views():
    before = graph_of(split_neg)
    assert cut_to_pairs(graph_of(slice_neg), before) is None
    for another in (
        lambda call, x: slice_neg(call, x, begin=1),
        lambda call, x: split_neg(call, x, part=0),
    ):
        assert not is_equal_by_pairs(graph_of(another), before)


@pytest.mark.parametrize(("other", "is_equal"), [("mul", True), ("exp", False)])
def test_a_choice_is_proven_by_its_operands(other, is_equal):
    """Abstract numbers that only decide prove nothing."""
    lines = (
        "exp: f32[2, 3] = aten.exp(I.x)",
        "mul: f32[2, 3] = aten.mul.Scalar(I.x, 1)",
        "le: b8[2, 3] = aten.le.Tensor({}, exp)",
    )
    before, after = (
        parse(*lines[:2], lines[2].format(operand), results=["fwd._.le"])
        for operand in ("I.x", other)
    )
    assert oracles._differ_in_equal_pairs(after, before, "reordered", 0) is is_equal


def test_operators_that_change_places_are_proven_at_their_results():
    """Both keep their names, and the values in between are others."""
    lines = "mul: f32[2, 3] = aten.mul.Scalar({}, 4)", "neg: f32[2, 3] = aten.neg({})"
    before = parse(lines[0].format("I.x"), lines[1].format("mul"), results=["fwd._.neg"])
    after = parse(lines[1].format("I.x"), lines[0].format("neg"), results=["fwd._.mul"])
    assert not is_equal_by_pairs(after, before)
    assert oracles._differ_in_equal_pairs(after, before, "reordered", 0)
    (mul,) = after.graph.find_nodes(op="call_function", target=aten.mul.Scalar)
    mul.args = (mul.args[0], 3)
    assert not oracles._differ_in_equal_pairs(after, before, "reordered", 0)


@pytest.mark.parametrize(("factor", "is_equal"), [(1, True), (2, False)])
def test_a_value_may_stand_for_an_input(factor, is_equal):
    lines = f"other: f32[2, 3] = aten.mul.Scalar(I.x, {factor})", "exp: f32[2, 3] = aten.exp({})"
    before, after = (
        parse(lines[0], lines[1].format(operand), results=["fwd._.exp"])
        for operand in ("I.x", "other")
    )
    assert oracles._differ_in_equal_pairs(after, before, "reordered", 0) is is_equal


@pytest.mark.gt_world("fake", size=4)
def test_groups_of_the_same_ranks_do_the_same(gt_world):
    functional = torch.ops._c10d_functional

    def gathered_over(ranks):
        group = dist.new_group(ranks).group_name
        gather = functional.all_gather_into_tensor.default

        def made(call, x):
            return call(functional.wait_tensor.default, call(gather, x, 2, group))

        return graph_of(made)

    before = gathered_over([0, 1])
    assert cut_to_pairs(gathered_over([0, 1]), before) is None
    assert cut_to_pairs(gathered_over([0, 2]), before) is not None


@pytest.mark.parametrize("memories", [2, 1])
def test_writes_to_two_memories_may_change_places(memories):
    """Those to one memory may not."""
    lines = ["a: f32[2, 3] = aten.clone(I.x)", "b: f32[2, 3] = aten.exp(I.x)"]
    written = ("a", "b") if memories == 2 else ("a", "a")
    writes = [
        f"c: f32[2, 3] = aten.add_.Tensor({written[0]}, I.x)",
        f"d: f32[2, 3] = aten.mul_.Tensor({written[1]}, I.x)",
    ]
    results = ["fwd._.a", "fwd._.b"]
    before = parse(*lines, *writes, results=results)
    after = parse(*lines, *writes[::-1], results=results)
    assert is_equal_by_pairs(after, before) is (memories == 2)
