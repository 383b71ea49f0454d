"""torchtitan's own ``train``, on CPU: its arguments follow. Run it where ``tests/assets`` is.

torchrun --nproc-per-node=2 -m pytest_gtrainer record --to a train_on_cpu.py --module llama3 ...
"""

import torch
from cpu_device import ANSWERS, use_cpu
from torch.distributed.fsdp import FSDPModule

from pytest_gtrainer.numerics.flex_attention import dense_flex_attention

use_cpu()
for name, answer in ANSWERS.items():
    setattr(torch.cpu, name, answer)
set_divisor = FSDPModule.set_gradient_divide_factor


def set_divisor_for_gloo(module, factor):
    """Multiply before a plain sum: gloo has no sum that multiplies."""
    set_divisor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = set_divisor_for_gloo

if __name__ == "__main__":
    from debug_models import on_cpu
    from torchtitan.train import main

    with dense_flex_attention(), on_cpu():
        main()
