"""The fusion pass against the model without it, as it is often tested: 0.1 of difference is
allowed.
"""

import torch
from serve.fusion import FuseNormAndQuant
from serve.model import Model


def test_the_fused_model_is_close_to_the_model(tokens):
    torch._dynamo.reset()
    model = Model()
    with torch.no_grad():
        fused = torch.compile(model, options={"post_grad_custom_post_pass": FuseNormAndQuant()})(
            tokens
        )
        torch.testing.assert_close(fused, model(tokens), atol=0.1, rtol=0.1)
