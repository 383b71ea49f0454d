"""How many devices there are, and on which the ranks run; decided without importing torch.

Terms: a *slot* is the right to run one rank. With GPUs a slot is a GPU; without, it is a
CPU slot, of which ``--gt-gpus`` says how many there are.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import pytest

from pytest_gtrainer import options

DEFAULT_CPU_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Devices:
    """What the run may use: ``slots`` ranks on ``kind`` ("cpu" or "cuda")."""

    kind: str
    slots: int

    @property
    def backend(self) -> str:
        """The process group backend of ranks on these devices."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def __str__(self) -> str:
        if self.kind == "cuda":
            return f"{self.slots} CUDA {'rank' if self.slots == 1 else 'ranks'} (nccl)"
        return f"{self.slots} CPU {'rank' if self.slots == 1 else 'ranks'} (gloo), no GPU used"


def count_gpus() -> int:
    """GPUs that a rank could use: NVML's count, confined to ``CUDA_VISIBLE_DEVICES``."""
    present = _nvml_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA stops at the first entry that is not a device, so "-1" and "" hide all.
    count = 0
    for entry in visible.split(","):
        entry = entry.strip()
        if not entry or entry.startswith("-") or (entry.isdecimal() and int(entry) >= present):
            break
        count += 1
    return min(count, present)


def _nvml_count() -> int:
    """Ask the driver's management library, which starts no CUDA context in this process."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint(0)
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()


def resolve(config: pytest.Config) -> Devices:
    """Apply ``--gt-gpus`` and ``--gt-device`` to what is there.

    Raises:
        pytest.UsageError: CUDA was asked for and is absent, or fewer GPUs than promised.
    """
    promised: int | None = options.get(config, "gpus")
    wanted: str = options.get(config, "device")
    present = 0 if wanted == "cpu" else count_gpus()
    if present == 0:
        if wanted == "cuda":
            raise pytest.UsageError("--gt-device=cuda: no GPU is visible; use --gt-device=cpu, or auto")
        return Devices("cpu", promised or DEFAULT_CPU_SLOTS)
    if promised is not None and promised > present:
        raise pytest.UsageError(
            f"--gt-gpus={promised}: only {present} GPUs are visible; promise at most {present}, "
            "or use --gt-device=cpu"
        )
    return Devices("cuda", promised or present)
