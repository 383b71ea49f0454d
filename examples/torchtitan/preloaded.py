"""``gt_preload``: what every rank would import for itself, in 6 seconds of CPU time.

Here no fixture says yet that the CPU is the device, and torchtitan asks once, as it is imported.
"""

import os

from cpu_device import use_cpu

use_cpu()
# pyarrow, which its data sets import, starts a thread that frees memory: such a process cannot fork.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

import whole_trainer  # noqa: E402, F401
