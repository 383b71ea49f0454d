"""Lines of weight digests: how they are made of weights that lie on a GPU."""

import pytest
import torch

from pytest_gtrainer.numerics import digest as weight_digests
from pytest_gtrainer.numerics.digest import print_weight_digest


@pytest.mark.parametrize(("device", "algorithm"), [("cpu", "xxh3_128"), ("meta", "mix128")])
def test_weights_are_digested_where_they_lie(
    monkeypatch: pytest.MonkeyPatch, capsys, device: str, algorithm: str
):
    """L1: "meta" plays the GPU; one tensor that is not on the host decides."""
    monkeypatch.setenv("GT_WEIGHT_HASH", "1")
    monkeypatch.setattr(
        weight_digests, "digest", lambda tensors, algorithm: f"{algorithm}:{len(tensors)}"
    )
    print_weight_digest(3, 5, "eager", [("a", torch.ones(1)), ("b", torch.ones(1, device=device))])
    assert capsys.readouterr().out == f"weights step 3 rank 5 {algorithm}:2 eager\n"


@pytest.mark.parametrize("value", ["0", ""])
def test_only_one_switches_it_on(monkeypatch: pytest.MonkeyPatch, capsys, value: str):
    monkeypatch.setenv("GT_WEIGHT_HASH", value)
    print_weight_digest(0, 0, "eager", [("a", torch.ones(1))])
    assert not capsys.readouterr().out
