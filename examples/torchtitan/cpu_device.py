"""What torchtitan asks of a device for its metrics, answered by ``torch.cpu``, which has not all of it.

Numbers that no test may judge are NaN: no comparison with them holds.
"""

from types import SimpleNamespace

import torch

NAN = float("nan")
ANSWERS = {
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=NAN),
    "memory_stats": lambda device=None: {"active_bytes.all.peak": NAN},
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
}


def use_cpu():
    """Let torchtitan, which is imported later, take the CPU as the device of this process."""
    for name, answer in ANSWERS.items():
        setattr(torch.cpu, name, answer)
    torch._utils._get_available_device_type = lambda: "cpu"
