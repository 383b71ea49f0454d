"""How many devices there are, on which the ranks run, and how torchrun has started this process; without torch.

A *slot* is the right to run one rank: a GPU, or, without GPUs, one of as many CPU slots as ``--gt-gpus`` says.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from pytest_gtrainer import options

DEFAULT_CPU_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that a rank could use: how ``CUDA_VISIBLE_DEVICES`` calls it, and which one it is."""

    entry: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Devices:
    """What the run may use: ``slots`` ranks, as ``giver`` says, on ``kind`` ("cpu" or "cuda"), there on these GPUs."""

    kind: str
    slots: int
    gpus: tuple[Gpu, ...] = ()
    giver: str = "--gt-gpus gives"
    in_process: bool = False  # --gt-one-rank: the one rank is pytest's own process

    @property
    def backend(self) -> str:
        """The process group backend of ranks on these devices."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def __str__(self) -> str:
        ranks = "rank" if self.slots == 1 else "ranks"
        by = ", in this process: no order of ranks shows" if self.in_process else ""
        by = ", started by torchrun" if self.giver.startswith("torchrun") else by
        if self.kind == "cuda":
            return f"{self.slots} CUDA {ranks} (nccl){by}"
        return f"{self.slots} CPU {ranks} (gloo){by}, no GPU used"


BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""What makes CUDA count GPUs as NVML and nvidia-smi do; left alone, it puts the fastest kind first."""


def visible_gpus(*, to_lease: bool = True) -> tuple[Gpu, ...]:
    """What NVML sees, as ``CUDA_VISIBLE_DEVICES`` leaves it; ``to_lease`` if it matters which GPU is which."""
    present, visible = _nvml_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    kinds = dict.fromkeys(kind for _, kind in present)
    is_counted = any(entry.strip().isdecimal() for entry in (visible or "").split(","))
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == BUS_ORDER["CUDA_DEVICE_ORDER"]
    if to_lease and is_counted and len(kinds) > 1 and not by_bus:
        wrong = f"CUDA_VISIBLE_DEVICES={visible} counts GPUs of several kinds ({', '.join(kinds)})"
        advice = "set CUDA_DEVICE_ORDER=PCI_BUS_ID, to count them as nvidia-smi does, or name them by UUID"
        raise pytest.UsageError(f"{wrong}, and CUDA puts the fastest kind first: {advice}")
    return confined([uuid for uuid, _ in present], visible)


def confined(uuids: Sequence[str], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that an environment variable leaves of those present. Indices count in the order of the bus. As CUDA
    reads it: UUIDs may be cut short, and the list ends at the first entry that is no device."""
    if visible is None:
        return tuple(Gpu(str(index), uuid) for index, uuid in enumerate(uuids))
    found: dict[str, Gpu] = {}
    for entry in map(str.strip, visible.split(",")):
        if entry.isdecimal():
            fitting = list(uuids[int(entry) : int(entry) + 1])
        elif entry.startswith("MIG-"):
            fitting = [entry] if uuids else []  # a part of a GPU, which NVML lists below it
        else:
            fitting = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if len(fitting) != 1 or fitting[0] in found:
            break
        found[fitting[0]] = Gpu(entry, fitting[0])
    return tuple(found.values())


def _nvml_gpus() -> list[tuple[str, str]]:
    """UUID and kind of each GPU in the order of the bus, from the driver's library, which starts no CUDA context."""
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
        gpus = []
        for index in range(count.value):
            device, uuid, kind = (
                ctypes.c_void_p(),
                ctypes.create_string_buffer(96),
                ctypes.create_string_buffer(96),
            )
            if (
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
            ):  # what fails leaves its text empty
                nvml.nvmlDeviceGetUUID(device, uuid, len(uuid))
                nvml.nvmlDeviceGetName(device, kind, len(kind))
            gpus.append((uuid.value.decode() or f"GPU-without-uuid-{index}", kind.value.decode()))
        return gpus
    finally:
        nvml.nvmlShutdown()


_RESOLVED = pytest.StashKey[tuple[list[str | None], Devices]]()


def resolve(config: pytest.Config) -> Devices:
    """What ``--gt-gpus`` and ``--gt-device`` leave of what is there; pytest.UsageError if that is not enough."""
    # every test asks: the driver answers once
    surroundings = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")]
    known = config.stash.get(_RESOLVED, None)
    if known is None or known[0] != surroundings:
        found = _resolved(config)
        if options.get(config, "one-rank"):
            found = Devices(found.kind, 1, found.gpus[:1], "--gt-one-rank gives", in_process=True)
        config.stash[_RESOLVED] = known = surroundings, found
    return known[1]


def _resolved(config: pytest.Config) -> Devices:
    promised: int | None = options.get(config, "gpus")
    wanted: str = options.get(config, "device")
    launch = launch_of(config)
    gpus = () if wanted == "cpu" else visible_gpus(to_lease=launch is None)
    if not gpus and wanted == "cuda":
        raise pytest.UsageError("--gt-device=cuda: no GPU is visible; use --gt-device=cpu, or auto")
    if launch is not None:
        # the ranks that torchrun has started, over all nodes; this node's GPUs say what they are on
        if promised is not None and promised > launch.size:
            wrong = f"--gt-gpus={promised}: torchrun has started {launch.size} ranks"
            raise pytest.UsageError(
                f"{wrong}; promise at most {launch.size}, or have torchrun start more"
            )
        if gpus and len(gpus) < launch.local_size:
            wrong = f"torchrun has started {launch.local_size} ranks on a node where {len(gpus)} GPUs are visible"
            raise pytest.UsageError(
                f"{wrong}; start as many as there are GPUs, or use --gt-device=cpu"
            )
        return Devices(
            "cuda" if gpus else "cpu", promised or launch.size, gpus, "torchrun has started"
        )
    if not gpus:
        return Devices("cpu", promised or DEFAULT_CPU_SLOTS)
    if promised is not None and promised > len(gpus):
        way_out = f"promise at most {len(gpus)}, or use --gt-device=cpu"
        raise pytest.UsageError(
            f"--gt-gpus={promised}: only {len(gpus)} GPUs are visible; {way_out}"
        )
    return Devices("cuda", promised or len(gpus), gpus[:promised])


_OF_TORCHRUN = (
    "TORCHELASTIC_RUN_ID",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_LAUNCH = pytest.StashKey["Launch | None"]()


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process among those that torchrun has started, and among those of the same node."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def leads(self) -> bool:
        """Whether this is the process that owns the tests and reports for all."""
        return self.rank == 0


def launch_in(environ: Mapping[str, str]) -> Launch | None:
    """The launch that the environment tells of, None without torchrun."""
    if not all(name in environ for name in _OF_TORCHRUN):
        return None
    return Launch(
        *(int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    )


def launch_of(config: pytest.Config) -> Launch | None:
    """The launch of this pytest process: None without torchrun, and in the session of a rank."""
    if _LAUNCH not in config.stash:
        config.stash[_LAUNCH] = None if hasattr(config, "workerinput") else launch_in(os.environ)
    return config.stash[_LAUNCH]


def check_launch(config: pytest.Config) -> None:
    """Refuse, by a usage error, what cannot be had under torchrun."""
    launch = launch_of(config)
    if launch is not None and options.get(config, "one-rank"):
        raise pytest.UsageError("--gt-one-rank: torchrun has started ranks; run pytest without it")
    if launch is not None and (
        config.getoption("tx", None) or config.getoption("numprocesses", None)
    ):
        wrong = f"torchrun has started the {launch.size} ranks of this run, and xdist would start processes of its own"
        raise pytest.UsageError(f"{wrong}: leave out -n and --dist")
