"""How many generated models the rule ``generated`` judges here."""

import pytest

from pytest_gtrainer.conformance import rules

FEW = 4
WITH_ALL_MODELS = pytest.mark.long


@pytest.fixture(autouse=True)
def few_generated_models(request, monkeypatch):
    """Draw the first few of the models: all of them take a minute for each pass.

    Tests marked ``WITH_ALL_MODELS`` run before releases, and draw them all.
    """
    if request.node.get_closest_marker(WITH_ALL_MODELS.name) is None:
        monkeypatch.setattr(rules, "EXAMPLES", FEW)
