"""Arguments of ``assert_same_model`` with which a green would mean nothing are refused by name."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytest_gtrainer import AnotherFunction, assert_same_model


def reference():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def parallel(mesh):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(reference(), mesh["tp"], plan)


def step(model, x):
    return model(x).square().mean()


def batch(coordinate):
    return (torch.randn(2, 4),)


def takes_two(mesh, rank):
    return parallel(mesh)


def no_loss(losses):
    return None


TYPES = {
    "a module": ({"parallel": reference()}, "parallel is a module, Sequential: give a function"),
    "parallel None": ({"parallel": None}, "parallel is None: give a function"),
    "a class": (
        {"parallel": lambda: nn.Linear},
        r"parallel returns <class .*return the nn\.Module",
    ),
    "returns None": ({"parallel": lambda: None}, "parallel returns None: return the nn.Module"),
    "a function": ({"parallel": lambda: step}, "parallel returns <function.*return the nn.Module"),
    "step first": (
        {"parallel": lambda: (step, reference())},
        "(?s)parallel returns .*, or a tuple of it and its own step",
    ),
    "three": (
        {"parallel": lambda: (reference(), step, 1)},
        r"(?s)parallel returns \(.*, or a tuple of",
    ),
    "two arguments": ({"parallel": takes_two}, "mesh is None, so parallel is called without arg"),
    "reference module": ({"reference": reference()}, "reference is a module, Sequential: give a f"),
    "reference None": ({"reference": None}, "reference is None: give a function"),
    "reference returns": ({"reference": lambda: None}, "what reference returns is None: give the"),
    "reference of a mesh": (
        {"reference": lambda mesh: reference()},
        "reference is called without arguments: missing a required argument: 'mesh'",
    ),
    "step None": ({"step": None}, "step is None: give a function"),
    "batch None": ({"batch": None}, "batch is None: give a function"),
    "batch dict": ({"batch": {0: batch(0)}}, r"batch is \{0: .*: give a function"),
    "batch takes none": (
        {"batch": lambda: batch(0)},
        "batch is called with a data coordinate: too many positional arguments",
    ),
    "no batch": ({"batch": lambda at: None}, r"batch\(0\) is None: give a tuple of the step's inp"),
    "a dict": ({"batch": lambda at: {"x": batch(at)}}, r"batch\(0\) is \{'x': .*: give a tuple"),
    "one tensor": (
        {"batch": lambda at: torch.ones(1, 2, 4)},
        r"batch\(0\) is tensor.*: give a tup",
    ),
    "mesh text": ({"mesh": "tp"}, "mesh is 'tp': give the mesh of the ranks, gt_mesh, or none"),
    "data None": ({"data_dims": None}, "data_dims is None: give a tuple of names of the mesh's"),
    "data text": ({"data_dims": "dp"}, "data_dims is 'dp': give a tuple of names"),
    "data number": ({"data_dims": (0,)}, "one of data_dims is 0: give the name of a dimension"),
    "loss None": ({"loss_dims": None}, "loss_dims is None: give a tuple of names"),
    "local list": ({"local": []}, r"local is \[\]: give a dict, as"),
    "local number": ({"local": {0: ("tp", 0)}}, "a pattern in local is 0: give the name"),
    "local 1-tuple": (
        {"local": {"0.weight": ("tp",)}},
        r"local=\{'0.weight': \('tp',\)\}: give a tuple of the dimension of the mesh and that",
    ),
    "local text": ({"local": {"0.weight": "tp"}}, r"local=\{'0.weight': 'tp'\}: give a tuple of"),
    "local dimension": ({"local": {"0.weight": ("tp", "0")}}, r"'tp', '0'\)\}: give a tuple of"),
    "combine": ({"combine": no_loss}, "combine returns None: return one loss, made of all"),
}
VALUES = {
    "empty": ({"batch": lambda at: ()}, r"batch\(0\) is empty: give a tuple of the step's inputs"),
    "twice": ({"loss_dims": ("cp", "cp")}, r"loss_dims=\('cp', 'cp'\) has 'cp' twice: name it on"),
    "data without a mesh": (
        {"data_dims": ("fsdp",)},
        r"data_dims=\('fsdp',\), and there is no mesh: give mesh=gt_mesh",
    ),
    "loss without a mesh": ({"loss_dims": ("cp",)}, r"loss_dims=\('cp',\), and there is no mesh"),
    "a vector": (
        {"step": lambda model, x: model(x).square().mean(0)},
        r"the step returns a tensor of shape \[4\] for the reference, .*: return the loss, one num",
    ),
    "a vector of all": (
        {"combine": lambda losses: torch.cat([losses[0][None], losses[0][None]])},
        r"combine returns a tensor of shape \[2\] for all losses",
    ),
    "a vector in parallel": (
        {"parallel": lambda: (reference(), lambda model, x: model(x))},
        r"the step returns a tensor of shape \[2, 4\] for the parallel model",
    ),
}


def call(**others):
    given = {"parallel": reference, "reference": reference, "step": step, "batch": batch} | others
    functions = [given.pop(name) for name in ("parallel", "reference", "step", "batch")]
    return assert_same_model(*functions, **given)


@pytest.mark.parametrize("case", TYPES)
def test_an_argument_of_another_type(case):
    others, words = TYPES[case]
    with pytest.raises(TypeError, match=words):
        call(**others)


@pytest.mark.parametrize("case", VALUES)
def test_a_value_that_would_mean_nothing(case):
    others, words = VALUES[case]
    with pytest.raises(ValueError, match=words):
        call(**others)


def test_a_loss_of_one_number_in_a_vector():
    """``backward`` accepts it, and so do we."""
    assert call(step=lambda model, x: step(model, x)[None]).kind == "reordered"


@pytest.mark.gt_world("simulated", size=2, mesh={"dp": 1, "tp": 2})
@pytest.mark.parametrize(
    "local",
    [{"0.weight": ("tp", 0)}, {"2.bias": ("tp", 0)}, {"*.weight": ("tp", 1)}],
    ids=["a DTensor", "whole on each rank", "several DTensors"],
)
def test_local_that_no_rank_needs(local, gt_mesh):
    """Torch says itself where it belongs, so what ``local`` says of it would count for nothing."""
    with pytest.raises(ValueError, match=r"local=\{.*\} is used by no rank: what it names is a DT"):
        call(parallel=parallel, mesh=gt_mesh, local=local)


class OwnRows(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.head = nn.Parameter(torch.ones(rows, 4))

    def forward(self, x):
        return x @ self.head.T


@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2, "ep": 1})
def test_local_that_is_used(gt_mesh):
    """Along a dimension of one rank a part is the whole; a second pattern for a name is none."""

    def check(local):
        return call(
            parallel=lambda mesh: OwnRows(2),
            reference=lambda: OwnRows(4),
            step=lambda model, x: model(x).square().sum(),
            mesh=gt_mesh,
            data_dims=(),
            loss_dims=("tp",),
            combine="sum",
            local=local,
        )

    assert check({"head": ("tp", 0)}).kind == "reordered"
    assert check({"h*": ("tp", 0), "head": ("ep", 0)}).kind == "reordered"
    with pytest.raises(ValueError, match=r"local=\{'head': \('tp', 0\)\} is used by no rank"):
        check({"h*": ("tp", 0), "head": ("tp", 0)})


@pytest.mark.gt_world("ranks", size=2, mesh={"tp": 2})
def test_ranks_without_a_mesh(gt_mesh):
    """All ranks would have one batch, so a reduction over data that is left out would not show."""
    with pytest.raises(AnotherFunction, match=r"communicates: give .* or its mesh, mesh="):
        call(parallel=lambda: parallel(gt_mesh))
    assert call().kind == "reordered"
