"""Models, optimisers and modules beside them are found among the objects of the process."""

import gc

import pytest
import torch
from torch import nn

from pytest_gtrainer.over_time import found


@pytest.fixture(autouse=True)
def objects_of_other_tests_are_not_found():
    gc.collect()
    gc.freeze()


class FSDPLike(nn.Linear):
    """A class whose own name begins as one of ``fully_shard`` does."""


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def sgd(*modules):
    return torch.optim.SGD([each for module in modules for each in module.parameters()])


def test_the_outermost_and_the_smallest_module_of_parameters():
    whole = Whole()
    assert found.outermost(whole.second[1]) is whole
    assert found.outermost(whole) is whole
    assert found.holder_of(list(whole.second[1].parameters())) is whole.second[1]
    assert found.holder_of(list(whole.second.parameters())) is whole.second
    assert found.holder_of([whole.first.weight, whole.second[0].bias]) is whole
    assert found.holder_of([whole.first.weight, torch.ones(1)]) is None


def test_optimisers_of_a_model_come_in_the_order_of_its_parameters():
    """Not in that in which they were made; those of other models are not among them."""
    whole, other = Whole(), Whole()
    kept = [sgd(other), sgd(whole.second[1]), sgd(other.first, whole.second[0]), sgd(whole.first)]
    assert [kept.index(each) for each in found.optimizers_of(whole)] == [3, 2, 1]
    assert [kept.index(each) for each in found.optimizers_of(other)] == [0, 2]
    assert found.optimizers_of(nn.Linear(2, 2)) == []


def test_a_model_is_trained_if_an_optimiser_holds_one_of_its_parameters():
    whole, teacher = Whole(), Whole()
    optimizer = sgd(whole.second)
    assert found.is_trained(whole)
    assert found.is_trained(whole.second[1])
    assert not found.is_trained(whole.first)
    assert not found.is_trained(teacher)
    # Copies in another precision are in no module: any module may be theirs.
    optimizer.param_groups[0]["params"] = [torch.ones(1, requires_grad=True)]
    assert found.is_trained(teacher)
    optimizer.param_groups[0]["params"] = []
    assert not found.is_trained(teacher)


def test_a_model_with_gradients_is_that_of_an_optimiser():
    first, second = Whole(), Whole()
    kept = sgd(first), sgd(second.second)
    assert found.model_with_gradients() is None
    second.first.weight.grad = torch.ones(2, 2)
    assert found.model_with_gradients() is None
    second.second[1].bias.grad = torch.ones(1)
    assert found.model_with_gradients() is second.second
    assert len(kept) == 2


def test_modules_beside_are_named_by_their_class_and_numbered_from_the_second_on():
    earlier = found.living_modules()
    model, average, other = Whole(), Whole(), Whole()
    shares = nn.Sequential(model.first, nn.Linear(2, 2))
    nothing, statistics = nn.Tanh(), nn.BatchNorm1d(2, affine=False)
    named = list(found.modules_beside(model, earlier))
    names = dict(named)
    assert list(names) == [name for name, _ in named]
    assert names == {"Whole": average, "Whole#2": other, "BatchNorm1d": statistics}
    assert shares is not nothing
    assert "Whole#3" in dict(found.modules_beside(nn.Linear(1, 1), earlier))
    assert list(found.modules_beside(model, found.living_modules())) == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (FSDPLike(1, 1), "FSDPLike"),
        (nn.Linear(1, 1), "Linear"),
        (torch.compile(nn.Linear(1, 1)), "Linear"),
        (nn.DataParallel(FSDPLike(1, 1)), "FSDPLike"),
    ],
)
def test_the_class_of_a_module_is_that_without_wrappers(module, name):
    assert found.class_of(module) == name
