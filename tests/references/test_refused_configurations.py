"""Configurations that cannot be trained are refused in one sentence, before anything runs."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pytest_gtrainer import (
    TrainConfig,
    assert_parity,
    assert_simulated_parity,
    data_parallel,
    train_eager,
    train_graph,
)
from pytest_gtrainer._torch.fsdp2 import parameter_groups
from pytest_gtrainer.graph.collectives import PlanError, kind_of, launches
from pytest_gtrainer.references.config import bucket_modules, new_model, new_optimizer
from pytest_gtrainer.references.eager import EagerRun
from pytest_gtrainer.references.graph import GraphRun

pytestmark = pytest.mark.gt_world("fake", size=2, mesh={"fsdp": 2})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def config_with(gt_mesh):
    def make(**changes):
        fields = {
            "model": Net,
            "step": lambda model, x: model(x).sum(),
            "batch": lambda step, rank: (torch.ones(3, 4),),
            "bucket_plan": ["layers.0", "layers.1", "head"],
            "mesh": gt_mesh,
        }
        return TrainConfig(**{**fields, **changes})

    return make


@pytest.mark.gt_world("fake", size=8, rank=6, mesh={"replicate": 2, "shard": 4})
def test_batches_of_a_mesh_of_two_dimensions_go_by_rank(config_with):
    """The coordinate counts the ranks that data is parallel over as the mesh lists them, the last
    dimension fastest.
    """
    config = config_with(batch=lambda step, coordinate: (torch.tensor(coordinate),))
    assert config.coordinate == 6, "rank 6 of 2 x 4 trains on another rank's batch"
    assert (config.inputs(0)[0], config.inputs(0, 0)[0]) == (6, 0), (
        "its own, and what the first rank is given"
    )


def test_the_root_is_wrapped_behind_the_modules_in_it_wherever_the_plan_has_it(config_with):
    """Else ``fully_shard`` gives it their parameters, and a module of the outermost level has no
    bucket of its own.
    """
    config = config_with(bucket_plan=["", "head", "layers.0", "layers.1"])
    order = [label for label, _ in bucket_modules(Net(), config.bucket_plan)]
    assert order[-1] == "the root", f"the root is wrapped before modules in it: {order}"
    model = EagerRun(config).model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [
        [names[id(each.sharded_param)] for each in group.fsdp_params]
        for group in parameter_groups(model)
    ]
    assert ["head.weight", "head.bias"] in held, f"the head is no group of its own: {held}"


class Nested(Net):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.experts, self.experts_gate = nn.Module(), nn.Linear(4, 4), nn.Linear(4, 4)
        self.outer.inner = nn.Linear(4, 4)


def test_a_bucket_is_wrapped_before_what_is_around_its_innermost_module():
    """Else ``fully_shard(outer)`` takes the parameters of ``outer.inner``, which the plan has
    elsewhere.
    """
    plan = ["outer", ["head", "outer.inner"], "layers.0", "layers.1"]
    order = [label for label, _ in bucket_modules(Nested(), plan)]
    assert order.index("head+outer.inner") < order.index("outer"), f"wrapped in the order {order}"


@pytest.mark.gt_world("fake", size=4, mesh={"efsdp": 2, "ep": 2})
@pytest.mark.parametrize(("name", "refused"), [("experts", False), ("experts_gate", True)])
def test_a_submesh_is_that_of_its_entry_alone(config_with, gt_mesh, name, refused):
    """``experts`` go over other ranks than the model's mesh; ``experts_gate``, whose name begins
    alike, does not.
    """

    def model():
        return parallelize_module(Nested(), gt_mesh["ep"], {name: ColwiseParallel()})

    plan = ["experts", "experts_gate", "outer", "head", "layers.0", "layers.1"]
    submeshes = {"experts": gt_mesh["efsdp"]}
    config = config_with(
        model=model, bucket_plan=plan, mesh=gt_mesh._flatten("fsdp"), submeshes=submeshes
    )
    if not refused:
        new_model(config)
    else:
        with pytest.raises(
            ValueError, match=r"experts_gate\.weight is a DTensor already, .* shares ranks"
        ):
            new_model(config)


def test_another_rewriting_keeps_the_options_that_it_does_not_name(config_with):
    """A control differs from what it controls in one thing alone."""
    run = GraphRun(config_with(), payload_order="execution", reshard_after_forward=True)
    options = run.rewritten(payload_order="registration")._options
    assert options == {"payload_order": "registration", "reshard_after_forward": True}, (
        "earlier options are forgotten"
    )


@pytest.mark.gt_world("fake", size=4, mesh={"replicate": 2, "shard": 2})
@pytest.mark.parametrize("scatter_first", [True, False])
def test_replicas_add_what_a_shard_group_has_scattered_unless_told(config_with, scatter_first):
    """D16: as FSDP2, by default; and as DTensor reduces, if the option says so."""
    nodes = GraphRun(config_with(), reduce_scatter_first=scatter_first).traced.gm.graph.nodes
    first = next(
        kind_of(node) for node in nodes if launches(node.target) and kind_of(node) != "all_gather"
    )
    assert first == ("reduce_scatter" if scatter_first else "all_reduce"), (
        "which reduction of a gradient comes first"
    )


@pytest.mark.parametrize("side", [EagerRun, GraphRun])
@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            ["layers.0", "layers.7", "head"],
            "names 'layers.7', .* you mean 'layers.1'.; its .* are layers, head; list",
        ),
        (
            [["layers.0", "layers.0.gone"], "layers.1", "head"],
            "names 'layers.0.gone', which the model does not have",
        ),
        (["layers.0", "head"], "leaves out layers.1"),
    ],
)
def test_a_plan_that_does_not_fit_the_model(config_with, side, plan, words):
    """B5: the same sentence on both sides."""
    with pytest.raises(PlanError, match=words):
        side(config_with(bucket_plan=plan))


def test_a_model_without_parameters_to_train(config_with):
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        GraphRun(config_with(model=lambda: Net().requires_grad_(False)))


def test_a_batch_that_is_no_tensor(config_with):
    """A6."""
    with pytest.raises(
        TypeError, match=r"inputs\[0\] is a str: inputs are tensors or plain Python scalars"
    ):
        GraphRun(config_with(batch=lambda step, rank: ("words",)))


def test_a_submesh_for_no_bucket_and_no_steps(config_with, gt_mesh):
    with pytest.raises(
        PlanError, match="submeshes names experts, which is no entry of the bucket plan"
    ):
        config_with(submeshes={"experts": gt_mesh})
    with pytest.raises(ValueError, match="steps=0: train for at least one step"):
        config_with(steps=0)


@pytest.mark.parametrize("side", [EagerRun, GraphRun])
def test_a_batch_whose_rows_would_be_the_inputs(config_with, side):
    """Eager code would get three inputs of four numbers: "not enough values to unpack", or no error
    at all.
    """
    config = config_with(batch=lambda step, rank: torch.ones(3, 4))
    with pytest.raises(
        TypeError, match=r"returns a tensor: return a tuple of the step's inputs, one as \(tensor,"
    ):
        config.inputs(0, 0)
    with pytest.raises(TypeError, match=r"TrainConfig.batch returns a tensor"):
        side(config)._compute_gradients(*config.inputs(0, 0))


@pytest.mark.parametrize("batch", [None, {"x": torch.ones(3, 4)}, "x", 3], ids=str)
def test_a_batch_that_is_no_tuple(config_with, batch):
    with pytest.raises(
        TypeError, match=r"what TrainConfig\.batch returns is .*: give a tuple of the"
    ):
        config_with(batch=lambda step, rank: batch).inputs(0, 0)


MESHES = {
    "without this rank": (
        [0, 1],
        "rank 3 of 4 is not in {name}, which has ranks [0, 1]: every rank that trains needs",
    ),
    "a rank twice": (
        [[0, 1], [1, 3]],
        "{name} has rank 1 more than once, [[0, 1], [1, 3]]: its dimensions must not",
    ),
}


@pytest.mark.gt_world("fake", size=4, rank=3)
@pytest.mark.parametrize("case", MESHES)
def test_a_mesh_that_cannot_be_trained_over(config_with, gt_mesh, case):
    """torch says "list index out of range" or "b must be 2D" later, or nothing until ranks
    disagree.
    """
    ranks, words = MESHES[case]
    mesh, submesh = (
        DeviceMesh("cpu", ranks),
        re.escape(words.format(name="the mesh of 'head' in submeshes")),
    )
    with pytest.raises(ValueError, match=re.escape(words.format(name="TrainConfig.mesh"))):
        config_with(mesh=mesh)
    with pytest.raises(ValueError, match=submesh):
        config_with(submeshes={"head": mesh})


@pytest.mark.gt_world("fake", size=4, rank=3)
def test_a_model_sharded_over_other_ranks(gt_mesh):
    with pytest.raises(
        ValueError,
        match=r"rank 3 of 4 is not in DeviceMesh\(.*: every rank that trains needs a mesh",
    ):
        data_parallel(Net(), DeviceMesh("cpu", [0, 1]))


@pytest.mark.gt_world("fake", size=4, mesh={"fsdp": 2, "tp": 2})
@pytest.mark.parametrize("side", [EagerRun, GraphRun])
def test_a_model_of_an_earlier_run_is_refused_and_one_that_is_tensor_parallel_is_not(
    config_with, gt_mesh, side
):
    """The one is sharded over these ranks already, the other over others."""
    same = data_parallel(Net(), gt_mesh["fsdp"])
    with pytest.raises(
        ValueError,
        match=r"layers.0.weight is a DTensor already, .*Shard\(dim=0\).* over "
        r"DeviceMesh\(.*fsdp=2.*, which shares "
        r"ranks \[0, 2\] .*TrainConfig.model must build a new, unsharded model at every call",
    ):
        side(config_with(mesh=gt_mesh["fsdp"], model=lambda: same))

    def tensor_parallel():
        return parallelize_module(Net(), gt_mesh["tp"], {"head": ColwiseParallel()})

    assert (
        side(config_with(mesh=gt_mesh["fsdp"], model=tensor_parallel)).model.head.weight is not None
    )


def with_a_hook():
    model = Net()
    model.head.weight.register_hook(lambda gradient: gradient)
    return model


MODELS = {
    "DDP": (
        lambda: DistributedDataParallel(Net()),
        r"wrapped by DistributedDataParallel.*TrainConfig\(replicate=True\)",
    ),
    "fully_shard": (lambda: fully_shard(Net()), "wrapped by fully_shard"),
    "compiled": (lambda: torch.compile(Net(), backend="eager"), "wrapped by torch.compile"),
    "hook": (with_a_hook, "the parameter head.weight has a hook"),
}


@pytest.mark.parametrize(("model", "words"), MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("side", [EagerRun, GraphRun])
def test_a_model_that_a_trace_cannot_hold_is_refused_on_both_sides(config_with, side, model, words):
    """V5: both sides wrap the model themselves."""
    with pytest.raises(
        ValueError,
        match=f"{words}.*TrainConfig.model must build a new, unsharded model at every call",
    ):
        side(config_with(model=model))


def test_a_step_that_calls_backward_is_refused(config_with):
    """V5: the eager side would train on it."""

    def accumulating(model, x):
        model(x).sum().backward()
        return model(x).sum()

    with pytest.raises(ValueError, match="return the sum of the losses"):
        GraphRun(config_with(step=accumulating))


@pytest.mark.gt_world("fake", size=4, mesh={"efsdp": 2, "ep": 2})
def test_a_submesh_of_two_dimensions(config_with, gt_mesh):
    with pytest.raises(
        ValueError,
        match="submeshes has a 2-D mesh for 'head': take the one dimension it is sharded over",
    ):
        config_with(mesh=gt_mesh["efsdp"], submeshes={"head": gt_mesh})


@pytest.mark.gt_world("fake", size=4, rank=1, mesh={"fsdp": 4})
def test_submeshes_that_share_some_of_their_ranks(config_with, gt_mesh):
    """Rank 0 would wait for ranks that do not know it; torch names neither mesh."""
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    words = (
        r"'layers.0' in submeshes is of a mesh of ranks \[0, 1\], and .*'head' .* \[1, 2\]: they "
        r"share \[1\] alone"
    )
    with pytest.raises(ValueError, match=words):
        config_with(submeshes={"layers.0": first, "head": second})
    config_with(submeshes={"layers.0": first, "head": first})


@pytest.mark.gt_world("fake", size=4, rank=1)
def test_a_submesh_beyond_the_mesh(config_with, gt_mesh):
    words = (
        r"the mesh of 'head' in submeshes has ranks \[0, 1, 2\], and TrainConfig.mesh has \[0, "
        r"1\], without \[2\]"
    )
    with pytest.raises(ValueError, match=words):
        config_with(
            mesh=DeviceMesh("cpu", [0, 1]), submeshes={"head": DeviceMesh("cpu", [0, 1, 2])}
        )


@pytest.mark.gt_world("fake", size=8, rank=1, mesh={"a": 2, "b": 2, "c": 2})
def test_submeshes_of_one_mesh_may_share_ranks(config_with, gt_mesh):
    """Two dimensions of a grid share half of their ranks with two others, and every rank
    has both.
    """
    submeshes = {
        "layers.0": gt_mesh["a", "b"]._flatten("ab"),
        "head": gt_mesh["b", "c"]._flatten("bc"),
    }
    config = config_with(mesh=gt_mesh._flatten("all"), submeshes=submeshes)
    assert {label: mesh.size() for label, mesh in config.submeshes.items()} == {
        "layers.0": 4,
        "head": 4,
    }


@pytest.mark.gt_world("simulated", size=4)
@pytest.mark.parametrize("train", [train_eager, train_graph])
def test_a_simulated_mesh_of_other_ranks(config_with, gt_world, train):
    with pytest.raises(
        ValueError, match="the mesh a=2 x b=3 has 6 ranks, the simulated world 4: make them equal"
    ):
        train(lambda mesh: config_with(mesh=mesh), world=replace(gt_world, mesh={"a": 2, "b": 3}))


@pytest.mark.gt_world("fake", size=8, mesh={"replicate": 2, "shard": 2, "tp": 2})
def test_a_mesh_of_three_dimensions_and_a_submesh_of_a_hybrid_one(config_with, gt_mesh):
    """D16: one dimension, or (replicate, shard)."""
    with pytest.raises(
        ValueError, match=r"a mesh has one dimension, or two \(replicate, shard\); this one is 3-D"
    ):
        config_with(mesh=gt_mesh)
    with pytest.raises(ValueError, match="submeshes beside a 2-D mesh are not supported"):
        config_with(mesh=gt_mesh["replicate", "shard"], submeshes={"head": gt_mesh["shard"]})


@pytest.mark.gt_world("fake", size=4)
@pytest.mark.parametrize("train", [train_eager, train_graph])
def test_a_function_that_builds_the_configuration_needs_a_world(config_with, train):
    with pytest.raises(ValueError, match="needs a mesh: give world=gt_world too"):
        train(lambda mesh: config_with(mesh=mesh))


WRONG_TYPES = {
    "steps=1.5": ({"steps": 1.5}, "steps=1.5: give a whole number"),
    "steps='2'": ({"steps": "2"}, "steps='2': give a whole number"),
    "steps=True": ({"steps": True}, "steps=True: give a whole number"),
    "mp_policy=None": ({"mp_policy": None}, "mp_policy is None: expected MixedPrecisionPolicy"),
    "chunk=3": ({"chunk": 3}, "chunk is 3, of type int: expected ChunkConfig or None"),
    "activation_checkpoint=True": (
        {"activation_checkpoint": True},
        "is True, of type bool: expected ActivationCheckpointConfig or None",
    ),
    "submeshes": (
        {"submeshes": {"head": 3}},
        "submeshes has 3, of type int for 'head': give a DeviceMesh",
    ),
    "mesh=None": ({"mesh": None}, "mesh is None: expected DeviceMesh"),
    "context=None": ({"context": None}, "context is None: give a function; leave it out for none"),
    "optimizer=3": ({"optimizer": 3}, "optimizer is 3, of type int: give a function"),
    "an optimizer": (
        {"optimizer": torch.optim.SGD(Net().parameters())},
        "optimizer is of type SGD: give a function",
    ),
    "model": ({"model": Net()}, "model is a Net: give a function that builds it"),
    "half a batch": (
        {"accumulate": 1.5},
        "accumulate=1.5: give a whole number of batches of a step",
    ),
    "accumulate=True": ({"accumulate": True}, "accumulate=True: give a whole number"),
    "replicate='no'": ({"replicate": "no"}, "replicate is 'no', of type str: expected bool"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_a_field_of_another_type(config_with, case):
    """Else the error is one of torch, on some rank; a word for a flag would be taken for True."""
    changes, words = WRONG_TYPES[case]
    with pytest.raises(TypeError, match=re.escape(words)):
        config_with(**changes)


WRONG_NUMBERS = {
    "negative norm": ({"max_norm": -1.0}, "max_norm=-1.0: give a number above 0"),
    "norm of 0": ({"max_norm": 0.0}, "max_norm=0.0: give a number above 0"),
    "NaN norm": ({"max_norm": float("nan")}, "max_norm=nan: give a number above 0"),
    "norm in words": ({"max_norm": "1"}, "max_norm='1': give a number above 0"),
    "buckets without DDP": (
        {"ddp_bucket_mb": 25},
        "ddp_bucket_mb=25 without replicate=True: only DDP has such buckets",
    ),
    "torch's buckets without DDP": ({"ddp_bucket_mb": None}, "None without replicate=True"),
    "negative buckets": (
        {"replicate": True, "ddp_bucket_mb": -1},
        "ddp_bucket_mb=-1: give a number of MiB",
    ),
    "no batch": ({"accumulate": 0}, "accumulate=0: a step has at least one batch"),
    "batches of DDP": (
        {"accumulate": 2, "replicate": True},
        "accumulate=2 with replicate=True: DDP reduces again what it has accumulated",
    ),
    "endless buckets": (
        {"replicate": True, "ddp_bucket_mb": float("inf")},
        "ddp_bucket_mb=inf: give a number of MiB",
    ),
}


@pytest.mark.parametrize("case", WRONG_NUMBERS)
def test_a_number_that_means_nothing(config_with, case):
    """Both sides would take it alike, so their bits would be equal."""
    changes, words = WRONG_NUMBERS[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        config_with(**changes)


def test_numbers_that_mean_something(config_with):
    assert config_with(max_norm=float("inf")).max_norm == float("inf"), "measured, not clipped"
    assert config_with(replicate=True, ddp_bucket_mb=None).ddp_bucket_mb is None


def of_other_parameters(parameters):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def of_the_last(parameters):
    return torch.optim.SGD(parameters[-1:], lr=0.1)


OPTIMIZERS = {
    "of nothing": (lambda parameters: None, TypeError, "optimizer returns None: return a torch"),
    "of others": (of_other_parameters, ValueError, "holds no parameter of the model, so no weight"),
}


@pytest.mark.gt_world("simulated", size=4, nodes=2)
@pytest.mark.parametrize("train", [train_eager, train_graph])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_an_optimizer_that_trains_nothing(config_with, gt_world, train, case):
    """Weights that nobody trains are equal on both sides."""
    optimizer, error, words = OPTIMIZERS[case]
    with pytest.raises(error, match=words):
        train(config_with(optimizer=optimizer, steps=1), world=gt_world)


def test_an_optimizer_of_some_parameters(config_with):
    """One parameter is enough, as where only a head is trained."""
    parameters = list(Net().parameters())
    optimizer = new_optimizer(config_with(optimizer=of_the_last), parameters)
    assert optimizer.param_groups[0]["params"] == parameters[-1:]


def test_a_number_of_ranks_to_reshard_to(config_with):
    """FSDP2 takes one; a graph would gather over all ranks again, in silence."""
    with pytest.raises(TypeError, match="reshard_after_forward=2: give True or False; resharding"):
        GraphRun(config_with(), reshard_after_forward=2)


@pytest.mark.gt_world("simulated", size=4)
@pytest.mark.parametrize("check", [assert_parity, assert_simulated_parity])
def test_no_world_and_no_configuration(config_with, gt_world, check):
    with pytest.raises(TypeError, match="world=None: give the world of the test"):
        check(config_with(), None)
    with pytest.raises(TypeError, match="the configuration is None: give a TrainConfig, or a"):
        check(None, gt_world)
    with pytest.raises(TypeError, match="returns None: return a TrainConfig"):
        check(lambda mesh: None, gt_world)
    with pytest.raises(TypeError, match="the configuration is None: give a TrainConfig, or a"):
        train_eager(None)
