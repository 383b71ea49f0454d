"""Expert parallelism on real ranks equals the model with all experts in one place."""

import pytest
import torch
import torch.distributed as dist

from fixtures.models.expert_parallel import apply_expert_parallel
from fixtures.models.loss import ce_step
from pytest_gtrainer import assert_bitwise_different, assert_bitwise_equal, trace_step

FLAVOR = "deepseek_v3/debug_small"


@pytest.mark.gt_world("ranks", size=4, mesh={"ep": 4})
def test_four_ranks_equal_one_model_on_the_whole_batch(gt_mesh, build, batch, run_step):
    check_against_one_model(gt_mesh["ep"], build, batch, run_step)


@pytest.mark.gt_world("ranks", size=2, mesh={"fsdp": 2, "ep": 1})
def test_one_expert_rank_exchanges_with_itself(gt_mesh, build, batch, run_step):
    check_against_one_model(gt_mesh["ep"], build, batch, run_step)


def check_against_one_model(mesh, build, batch, run_step):
    """Rank ``r`` has part ``r`` of the batch; losses and gradients of shared parameters average.

    An expert's gradient comes from all ranks' rows already, so it is divided only.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()
    whole = build(FLAVOR)
    expected = run_step(whole, ce_step, batch)
    model = apply_expert_parallel(build(FLAVOR), mesh)
    actual = run_step(model, ce_step, tuple(part.chunk(ranks)[rank] for part in batch))
    for name, value in actual.items():
        own = ".routed_experts." in name
        reference = expected[name].chunk(ranks)[rank] if own else expected[name]
        if not own:
            dist.all_reduce(value, group=mesh.get_group())
        torch.testing.assert_close(
            value / ranks, reference, msg=lambda text, name=name: f"{name}: {text}"
        )
    for part, full in zip(model.moe_layers(), whole.moe_layers(), strict=True):
        dist.all_reduce(part.tokens_per_expert, group=mesh.get_group())
        assert part.tokens_per_expert.tolist() == full.tokens_per_expert.tolist()


@pytest.mark.gt_world("ranks", size=4, mesh={"fsdp": 2, "ep": 2})
def test_ranks_keep_their_slice_of_the_initial_values(gt_mesh, build):
    full = dict(build(FLAVOR).named_parameters())
    model = apply_expert_parallel(build(FLAVOR), gt_mesh["ep"])
    first = 4 * gt_mesh.get_local_rank("ep")
    for name, parameter in model.named_parameters():
        expected = full[name][first : first + 4] if ".routed_experts." in name else full[name]
        assert_bitwise_equal(parameter.detach(), expected.detach(), what=name)


@pytest.mark.gt_world("ranks", size=2, mesh={"ep": 2})
def test_an_expert_in_the_wrong_place_shows(gt_mesh, build, batch):
    """The control of the comparison: with two experts swapped it must fail."""
    model = apply_expert_parallel(build(FLAVOR), gt_mesh["ep"])
    right = model(batch[0])
    with torch.no_grad():
        for weight in model.layers[1].moe.routed_experts.parameters():
            weight.copy_(weight.roll(1, 0))
    assert not torch.allclose(model(batch[0]), right)


@pytest.mark.second_tier
@pytest.mark.gt_world("ranks", size=2, mesh={"ep": 2})
def test_a_traced_exchange_equals_the_eager_one(gt_world, gt_mesh, build, batch, run_step):
    """One trace serves all sizes: with a bias on the first experts no row goes to the other
    rank.
    """
    traced = trace_step(apply_expert_parallel(build(FLAVOR), gt_mesh["ep"]), ce_step, batch)
    own = tuple(part.roll(gt_world.rank, 0) for part in batch)
    results = []
    for bias in (0.0, 100.0):
        eager, replayed = (apply_expert_parallel(build(FLAVOR), gt_mesh["ep"]) for _ in range(2))
        for layer in (*eager.moe_layers(), *replayed.moe_layers()):
            layer.expert_bias[:2] += bias
        expected = run_step(eager, ce_step, own)
        actual = {"loss": traced.replay(replayed, *own)} | {
            n: p.grad for n, p in replayed.named_parameters()
        }
        assert_bitwise_equal(actual, expected, what=f"traced against eager, bias {bias}")
        assert_bitwise_equal(
            dict(replayed.named_buffers()), dict(eager.named_buffers()), what="buffers"
        )
        results.append(actual)
    assert_bitwise_different(*results, what="rows that go to other experts")


@pytest.mark.second_tier
@pytest.mark.gt_world("fake", mesh={"fsdp": 2, "ep": 4})
def test_the_exchange_traces_in_a_fake_world(gt_mesh, build, batch):
    """Two all-to-alls of rows a layer and direction, one of counts."""
    model = apply_expert_parallel(build(FLAVOR), gt_mesh["ep"])
    traced = trace_step(model, ce_step, batch)
    sent = [n for n in traced.gm.graph.nodes if "all_to_all" in str(n.target)]
    backward = [n for n in sent if n.meta.get("autograd_backward")]
    layers = len(model.moe_layers())
    assert (len(sent) - len(backward), len(backward)) == (3 * layers, 2 * layers)


@pytest.mark.gt_world("fake", mesh={"fsdp": 2, "ep": 4})
def test_a_mesh_of_two_dimensions_is_refused(gt_mesh, build):
    with pytest.raises(ValueError, match=r"one mesh dimension; not over \('fsdp', 'ep'\)"):
        apply_expert_parallel(build(FLAVOR), gt_mesh)


@pytest.mark.gt_world("fake", mesh={"ep": 3})
def test_experts_that_do_not_divide_are_refused(gt_mesh, build):
    with pytest.raises(ValueError, match=r"layers\.1\.moe\.routed_experts: 8 experts .* 3 ranks"):
        apply_expert_parallel(build(FLAVOR), gt_mesh)
