"""How many devices there are, and on which the ranks run; decided without importing torch.

Terms: a *slot* is the right to run one rank. With GPUs a slot is a GPU; without, it is a
CPU slot, of which ``--gt-gpus`` says how many there are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pytest_gtrainer import launch as launches
from pytest_gtrainer import options
from pytest_gtrainer.environment import raw_environment

DEFAULT_CPU_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that a rank could use: how ``CUDA_VISIBLE_DEVICES`` calls it, and which one it is."""

    entry: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Devices:
    """What the run may use: ``slots`` ranks on ``kind`` ("cpu" or "cuda"), there on these ``gpus``.

    ``giver`` is who says how many slots there are.
    """

    kind: str
    slots: int
    gpus: tuple[Gpu, ...] = ()
    giver: str = "--gt-gpus gives"

    @property
    def backend(self) -> str:
        """The process group backend of ranks on these devices."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def __str__(self) -> str:
        ranks = "rank" if self.slots == 1 else "ranks"
        by = ", started by torchrun" if self.giver.startswith("torchrun") else ""
        if self.kind == "cuda":
            return f"{self.slots} CUDA {ranks} (nccl){by}"
        return f"{self.slots} CPU {ranks} (gloo){by}, no GPU used"


BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""What makes CUDA count GPUs as NVML and nvidia-smi do; left alone, it puts the fastest kind first."""


def visible_gpus(*, to_lease: bool = True) -> tuple[Gpu, ...]:
    """What NVML sees, confined to ``CUDA_VISIBLE_DEVICES`` and in its order.

    Args:
        to_lease: whether it must be known which GPU is which, and not only how many there are.

    Raises:
        pytest.UsageError: which GPUs the variable means is not known without CUDA.
    """
    present, visible = _nvml_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if to_lease:
        _check_order([kind for _, kind in present], visible, os.environ.get("CUDA_DEVICE_ORDER"))
    return confined([uuid for uuid, _ in present], visible)


def _check_order(kinds: Sequence[str], visible: str | None, order: str | None) -> None:
    """Refuse indices that count GPUs of several kinds in the order of their speed, which only CUDA itself knows."""
    counts = any(entry.strip().isdecimal() for entry in (visible or "").split(","))
    if counts and len(set(kinds)) > 1 and order != BUS_ORDER["CUDA_DEVICE_ORDER"]:
        raise pytest.UsageError(
            f"CUDA_VISIBLE_DEVICES={visible} counts GPUs of several kinds ({', '.join(dict.fromkeys(kinds))}), and "
            "CUDA puts the fastest kind first: set CUDA_DEVICE_ORDER=PCI_BUS_ID, to count them as nvidia-smi does, "
            "or name them by UUID"
        )


def confined(uuids: Sequence[str], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that an environment variable leaves of those present, as CUDA reads it.

    Indices count in the order of the bus, UUIDs may be cut short, and CUDA stops at the first
    entry that is not a device, so that "-1" and "" hide all.

    >>> [gpu.uuid for gpu in confined(["GPU-a1", "GPU-b2"], "1,GPU-a")]
    ['GPU-b2', 'GPU-a1']
    >>> confined(["GPU-a1", "GPU-b2"], "-1,0"), confined(["GPU-a1"], "")
    ((), ())
    """
    if visible is None:
        return tuple(Gpu(str(index), uuid) for index, uuid in enumerate(uuids))
    found: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        uuid = _named_by(entry, uuids)
        if uuid is None or any(gpu.uuid == uuid for gpu in found):
            break
        found.append(Gpu(entry, uuid))
    return tuple(found)


def _named_by(entry: str, uuids: Sequence[str]) -> str | None:
    if entry.isdecimal():
        return uuids[int(entry)] if int(entry) < len(uuids) else None
    if entry.startswith("MIG-"):
        return entry if uuids else None  # a part of a GPU, which NVML lists below it
    fitting = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def _nvml_gpus() -> list[tuple[str, str]]:
    """UUID and kind of each GPU in the order of the bus, from the driver's management library.

    It starts no CUDA context in this process.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint(0)
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [_nvml_gpu(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: ctypes.CDLL, index: int) -> tuple[str, str]:
    device, texts = ctypes.c_void_p(), [ctypes.create_string_buffer(96) for _ in range(2)]
    found = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
    asked = [
        found and ask(device, text, len(text)) == 0
        for ask, text in zip((nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetName), texts, strict=True)
    ]
    uuid, kind = (text.value.decode() if known else "" for text, known in zip(texts, asked, strict=True))
    return uuid or f"GPU-without-uuid-{index}", kind


_ORDERING = (b"CUDA_VISIBLE_DEVICES", b"CUDA_DEVICE_ORDER")
_RESOLVED = pytest.StashKey[tuple[list[bytes | None], Devices]]()


def resolve(config: pytest.Config) -> Devices:
    """Apply ``--gt-gpus`` and ``--gt-device`` to what is there.

    Raises:
        pytest.UsageError: CUDA was asked for and is absent, fewer GPUs than promised, or it is not known which.
    """
    # every test asks: the driver answers once
    surroundings = list(map(raw_environment().get, _ORDERING))
    known = config.stash.get(_RESOLVED, None)
    if known is None or known[0] != surroundings:
        config.stash[_RESOLVED] = known = surroundings, _resolved(config)
    return known[1]


def _resolved(config: pytest.Config) -> Devices:
    promised: int | None = options.get(config, "gpus")
    wanted: str = options.get(config, "device")
    launch = launches.of(config)
    gpus = () if wanted == "cpu" else visible_gpus(to_lease=launch is None)
    if not gpus and wanted == "cuda":
        raise pytest.UsageError("--gt-device=cuda: no GPU is visible; use --gt-device=cpu, or auto")
    if launch is not None:
        return _of_torchrun(launch, promised, gpus)
    if not gpus:
        return Devices("cpu", promised or DEFAULT_CPU_SLOTS)
    if promised is not None and promised > len(gpus):
        raise pytest.UsageError(
            f"--gt-gpus={promised}: only {len(gpus)} GPUs are visible; promise at most {len(gpus)}, "
            "or use --gt-device=cpu"
        )
    return Devices("cuda", promised or len(gpus), gpus[:promised])


def _of_torchrun(launch: launches.Launch, promised: int | None, gpus: Sequence[Gpu]) -> Devices:
    """The ranks that torchrun has started, over all nodes; this node's GPUs say what they are on."""
    if promised is not None and promised > launch.size:
        raise pytest.UsageError(
            f"--gt-gpus={promised}: torchrun has started {launch.size} ranks; promise at most {launch.size}, or have "
            "torchrun start more"
        )
    if gpus and len(gpus) < launch.local_size:
        raise pytest.UsageError(
            f"torchrun has started {launch.local_size} ranks on a node where {len(gpus)} GPUs are visible; start as "
            "many as there are GPUs, or use --gt-device=cpu"
        )
    return Devices("cuda" if gpus else "cpu", promised or launch.size, tuple(gpus), "torchrun has started")
