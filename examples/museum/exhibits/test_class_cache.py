"""The second model of a process gets the mixed precision of the first.

Our own find in torchtitan's graph trainer (2026): modules are wrapped by classes that are made when
they are first needed and kept by the names of module and parameters. What such a class does, as to
cast, is in its closures and not in the key, so a model without a policy still computed in bfloat16
if one with a policy had come before it.
"""

import torch
from museum import exhibit, usual
from torch import nn

from pytest_gtrainer import BitwiseDifference, assert_bitwise_equal


def wrap(module, dtype, classes, bug):
    """Give out ``module.weight`` in another dtype, by a property of a class of its own."""
    key = (type(module), "weight") if bug else (type(module), "weight", dtype)
    if key not in classes:

        def cast(self):
            return self._parameters["weight"].to(dtype)

        classes[key] = type("Wrapped", (type(module),), {"weight": property(cast)})
    module.__class__ = classes[key]
    return module


def outputs(bug):
    torch.manual_seed(0)
    x, classes = torch.randn(2, 4), {}
    wrap(nn.Linear(4, 4, bias=False), torch.bfloat16, classes, bug)
    second = wrap(nn.Linear(4, 4, bias=False), torch.float32, classes, bug)
    return {"output": nn.functional.linear(x.to(second.weight.dtype), second.weight)}


def alone():
    torch.manual_seed(0)
    x, _, second = torch.randn(2, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    return {"output": second(x)}


@exhibit(
    "torchtitan, our own find",
    2026,
    kind="stale or baked values",
    found_by="bits",
    raises=BitwiseDifference,
    says="dtype",
    usual=usual.of_results(outputs, alone),
)
def test_a_model_is_what_it_is_alone(bug):
    assert_bitwise_equal(outputs(bug), alone(), what="behind another model against alone")
