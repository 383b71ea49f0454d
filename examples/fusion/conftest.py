"""An option that switches the bug on, to see it caught; and the tokens that all tests share."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--with-bug", action="store_true", help="let the fused kernel take ten times eps"
    )
    parser.addoption(
        "--update-by-hand", action="store_true", help="write the texts of tests/test_by_hand.py"
    )


@pytest.fixture(autouse=True)
def bug(pytestconfig, monkeypatch):
    monkeypatch.setattr("serve.fusion.WITH_BUG", pytestconfig.getoption("with_bug"))


@pytest.fixture
def tokens():
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
