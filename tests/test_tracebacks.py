"""Tracebacks show the user's frames, and ours only where the error is our own."""

import pytest
import torch
from torch import nn

from pytest_gtrainer import VacuousCheck, assert_same_function, assert_same_model, facts, prove
from pytest_gtrainer.proofs import programs

X = torch.randn(2, 8)


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


class Broken(nn.Module):
    """Its second layer gets another width."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x)[:, :3])


def shown(error):
    """Return the modules of the frames that pytest shows, without those of torch."""
    entries = error.traceback.filter(error)
    names = [str(entry.frame.f_globals.get("__name__")) for entry in entries]
    return [name for name in names if not name.startswith("torch")]


def step(model, x):
    return model(x).square().mean()


@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_a_refusal_shows_the_call_alone(gt_mesh):
    with pytest.raises(VacuousCheck) as error:
        assert_same_model(
            lambda mesh: model(), model, step, lambda at: (X,), mesh=gt_mesh, data_dims=()
        )
    assert shown(error) == [__name__]
    with pytest.raises(ValueError, match="data_dims") as error:
        assert_same_model(lambda mesh: model(), model, step, lambda at: (X,), mesh=gt_mesh)
    assert shown(error) == [__name__]


@pytest.mark.gt_world("simulated", size=2, mesh={"tp": 2})
def test_an_error_of_a_model_shows_the_call_and_the_model(gt_mesh):
    for call in (
        lambda: assert_same_function(Broken(), model(), inputs=(X,)),
        lambda: assert_same_model(
            lambda mesh: Broken(), Broken, step, lambda at: (X,), mesh=gt_mesh, data_dims=()
        ),
    ):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
            call()
        assert set(shown(error)) == {__name__}
        assert any(entry.name == "forward" for entry in error.traceback.filter(error))


def test_an_error_of_our_own_shows_where_it_is(monkeypatch):
    def fails(self, mode, observed):
        return {}["ours"]

    fails = type(fails)(fails.__code__, {"__name__": "pytest_gtrainer.proofs.programs"})
    monkeypatch.setattr(programs.FunctionProgram, "_run", fails)
    with pytest.raises(KeyError, match="ours") as error:
        prove(torch.sin, torch.sin, inputs=(X,))
    assert "pytest_gtrainer.proofs.programs" in shown(error)
    assert facts.hides_frames(None)
