"""Generated programs and rewrites of them: right ones are never another function, wrong ones never
equal.

A program is a tree of operators on square tensors. Double precision is the oracle of both: a right
rewrite computes the same, and a wrong one that does is no mistake.
"""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_gtrainer import prove
from pytest_gtrainer.proofs.proof import KINDS

SIZE, LEAVES = 4, 3


def softmax_in_parts(x):
    """Compute a softmax as ring attention does: each part with its own maximum."""
    parts = x.chunk(2, 1)
    highest = [part.amax(1, keepdim=True) for part in parts]
    most = torch.maximum(*highest)
    made = [torch.exp(part - own) for part, own in zip(parts, highest, strict=True)]
    scales = [torch.exp(own - most) for own in highest]
    total = sum(part.sum(1, keepdim=True) * scale for part, scale in zip(made, scales, strict=True))
    return torch.cat([part * scale / total for part, scale in zip(made, scales, strict=True)], 1)


def dead(x):
    torch.sin(x).sum()
    return x


def in_place(a, b):
    result = a.clone()
    result.add_(b)
    return result


def through_a_buffer(a):
    buffer = torch.empty_like(a)
    buffer[:1] = a[:1]
    buffer[1:].copy_(a[1:])
    return buffer


OPERATORS = {
    "add": torch.add,
    "mul": torch.mul,
    "mm": torch.mm,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "scale": lambda a: a * 0.3,
    "clamp": lambda a: a.clamp(min=-0.5),
    "round": lambda a: a.bfloat16().to(a.dtype),
    "softmax": lambda a: torch.softmax(a, 1),
    "sum": lambda a: a.sum(0, keepdim=True).expand(SIZE, SIZE),
    "t": lambda a: a.t(),
    # what rewrites make
    "in place": in_place,
    "clone": lambda a: a.clone(),
    "buffer": through_a_buffer,
    "dead": dead,
    "cat": lambda a: torch.cat(a.split(1), 0),
    "cat columns": lambda a: torch.cat(a.chunk(2, 1), 1),
    "pad": lambda a: torch.nn.functional.pad(a, (1, 2, 0, 1))[:SIZE, 1 : SIZE + 1],
    "flip": lambda a: a.flip(0).flip(0),
    "round parts": lambda a: torch.cat([each.bfloat16() for each in a.split(2)]).to(a.dtype),
    "round twice": lambda a: a.bfloat16().to(a.dtype).bfloat16().to(a.dtype),
    "mm by rows": lambda a, b: torch.cat([part @ b for part in a.split(2)]),
    "mm by columns": lambda a, b: torch.cat([a @ part for part in b.split(2, 1)], 1),
    "mm in parts": lambda a, b: a[:, :2] @ b[:2] + a[:, 2:] @ b[2:],
    "bmm": lambda a, b: torch.bmm(a[None], b[None])[0],
    "sum in parts": lambda a: (a[:1].sum(0) + a[1:].sum(0)).expand(SIZE, SIZE),
    "softmax in parts": softmax_in_parts,
    "softmax by hand": lambda a: torch.exp(a) / torch.exp(a).sum(1, keepdim=True),
    # what mistakes make
    "sub": torch.sub,
    "twice": lambda a: a * 2,
    "another scale": lambda a: a * 0.31,
    "softmax of columns": lambda a: torch.softmax(a, 0),
    "sum of rows": lambda a: a.sum(1, keepdim=True).expand(SIZE, SIZE),
    "swapped": lambda a: torch.cat((a[2:], a[:2])),
    "late slice": lambda a: torch.cat((a[1:], a[:1])),
    "last": lambda a: a[-1:].expand(SIZE, SIZE),
    "part of mm": lambda a, b: a[:, :3] @ b[:3],
    "unscaled parts": lambda a: torch.cat([torch.softmax(part, 1) for part in a.chunk(2, 1)], 1),
}
UNARY = ("relu", "tanh", "scale", "clamp", "round", "softmax", "sum", "t")
BINARY = ("add", "add", "mul", "mm")


def evaluated(tree, leaves):
    if isinstance(tree, int):
        return leaves[tree]
    name, *operands = tree
    # So that no rewrite changes the strides of what others read.
    return OPERATORS[name](*(evaluated(each, leaves) for each in operands)).contiguous()


def size_of(tree):
    return 1 if isinstance(tree, int) else 1 + sum(map(size_of, tree[1:]))


TREES = st.recursive(
    st.integers(0, LEAVES - 1),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(UNARY), inner), st.tuples(st.sampled_from(BINARY), inner, inner)
    ),
    max_leaves=6,
).filter(lambda tree: 3 <= size_of(tree) <= 16)


def right_rewrites(tree):
    """Yield rewrites of the root that are right, and the kind that each must have at least."""
    for name in ("clone", "buffer", "dead", "cat", "cat columns", "pad", "flip"):
        yield (name, tree), "identical"
    yield ("t", ("t", tree)), "identical"
    if isinstance(tree, int):
        return
    if len(tree) == 2:
        yield from _of_one_operand(*tree)
    elif tree[0] == "mm":
        yield from _of_products(*tree[1:])
    elif tree[0] in ("add", "mul"):
        yield from _of_two_operands(*tree)


def _of_one_operand(name, operand):
    if name in ("relu", "clamp", "scale", "round"):
        yield ("t", (name, ("t", operand))), "identical"
    if name == "tanh":
        yield ("t", (name, ("t", operand))), "other kernels"
    if name == "round":
        yield ("round parts", operand), "identical"
        yield ("round twice", operand), "identical"
    if name == "sum":
        yield ("sum in parts", operand), "reordered"
    if name == "softmax":
        yield ("softmax in parts", operand), "reordered"
        yield ("softmax by hand", operand), "reordered"


def _of_two_operands(name, first, second):
    yield (name, second, first), "identical"
    if name == "add":
        yield ("in place", first, second), "identical"
    for left, right in ((first, second), (second, first)):
        if isinstance(left, int) or left[0] != "add":
            continue
        if name == "add":
            yield ("add", left[1], ("add", left[2], right)), "reordered"
        else:
            yield ("add", ("mul", left[1], right), ("mul", left[2], right)), "reordered"


def _of_products(left, right):
    yield ("t", ("mm", ("t", right), ("t", left))), "other kernels"
    for other in ("mm by rows", "mm by columns", "bmm"):
        yield (other, left, right), "other kernels"
    yield ("mm in parts", left, right), "reordered"
    if not isinstance(left, int) and left[0] == "add":
        yield ("add", ("mm", left[1], right), ("mm", left[2], right)), "reordered"


def wrong_rewrites(tree):
    """Yield rewrites of the root that most often compute something else."""
    for name in ("twice", "swapped", "late slice"):
        yield (name, tree)
    if isinstance(tree, int):
        yield (tree + 1) % LEAVES
        return
    name, *operands = tree
    others = {"scale": "another scale", "softmax": "softmax of columns", "sum": "sum of rows"}
    if name in others:
        yield (others[name], *operands)
    if name == "add":
        yield from ((("sub", *operands)), operands[0], operands[1])
    if name == "mm":
        yield from (("part of mm", *operands), ("mm", operands[1], operands[0]))
    if name == "softmax":
        yield ("unscaled parts", *operands)
    if name == "sum":
        yield ("last", *operands)
    if name in ("scale", "clamp", "round", "t", "tanh"):
        yield operands[0]


def rewritten(draw, tree, rewrites):
    """Return the tree with one of the rewrites at one of its places, and what goes with it."""
    places = [[]]
    for place in places:
        part = tree
        for step in place:
            part = part[step]
        if not isinstance(part, int):
            places += [[*place, number] for number in range(1, len(part))]
    place = draw(st.sampled_from(places))

    def at(part, rest):
        if not rest:
            found = draw(st.sampled_from(list(rewrites(part))))
            return found if rewrites is right_rewrites else (found, "")
        inner, kind = at(part[rest[0]], rest[1:])
        return (*part[: rest[0]], inner, *part[rest[0] + 1 :]), kind

    return at(tree, place)


def leaves(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, SIZE, generator=generator, dtype=dtype) for _ in range(LEAVES)]


def graph_of(tree):
    return make_fx(lambda *given: evaluated(tree, given))(*leaves())


def is_same_in_doubles(tree, other):
    """Roundings to bfloat16 may flip with an order of additions, so they are left out."""

    def unrounded(part):
        if isinstance(part, int):
            return part
        name = "clone" if part[0].startswith("round") else part[0]
        return (name, *map(unrounded, part[1:]))

    found = [evaluated(unrounded(each), leaves(torch.float64)) for each in (tree, other)]
    return torch.allclose(*found, rtol=1e-9, atol=1e-9)


def check_right(data):
    tree = data.draw(TREES)
    other, kinds = tree, []
    for _ in range(data.draw(st.integers(1, 3))):
        other, kind = rewritten(data.draw, other, right_rewrites)
        kinds.append(kind)
    assert is_same_in_doubles(tree, other)
    weakest = max(kinds, key=KINDS.index)
    if weakest == "reordered" and "round" in str(tree):
        weakest = "rounds elsewhere"  # a sum of two roundings is another number of float32
    proof = prove(graph_of(other), graph_of(tree))
    assert proof.is_at_least(weakest), f"{tree}\n{other}\n{weakest}: {proof}"


def check_wrong(data):
    tree = data.draw(TREES)
    other, _ = rewritten(data.draw, tree, wrong_rewrites)
    assume(not is_same_in_doubles(tree, other))
    proof = prove(graph_of(other), graph_of(tree))
    assert proof.kind == "another function", f"{tree}\n{other}\n{proof}"


def examples(number):
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=checks,
    )


@examples(30)
@given(st.data())
def test_right_rewrites_are_equal_in_their_kind(data):
    check_right(data)


@pytest.mark.second_tier
@examples(30)
@given(st.data())
def test_wrong_rewrites_are_another_function(data):
    check_wrong(data)


@pytest.mark.long
@examples(1000)
@given(st.data())
def test_a_thousand_right_rewrites(data):
    check_right(data)


@pytest.mark.long
@examples(1000)
@given(st.data())
def test_a_thousand_wrong_rewrites(data):
    check_wrong(data)
