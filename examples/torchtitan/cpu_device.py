"""What torchtitan asks of a device, answered by ``torch.cpu``, which has not all of it.

Numbers that no test may judge are NaN: no comparison with them holds.
"""

from types import SimpleNamespace

import torch

NAN = float("nan")
ANSWERS = {
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=NAN),
    "memory_stats": lambda device=None: {"active_bytes.all.peak": NAN},
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
}


def use_cpu():
    """Let torchtitan, which is imported later, take the CPU as the device of this process.

    In pytest ``--gt-cuda-as=cpu`` does that.
    """
    torch._utils._get_available_device_type = lambda: "cpu"
