"""The devices of the run, and the place of this process under torchrun. Imports no torch.

A *slot* is the right to run one rank: a GPU, or, without GPUs, one of as many CPU slots as
``--gt-gpus`` says.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest

from pytest_gtrainer import options
from pytest_gtrainer.facts import counted

DEFAULT_CPU_SLOTS = 8


class Gpu(NamedTuple):
    """A GPU that a rank could use: its entry in ``CUDA_VISIBLE_DEVICES``, and its UUID."""

    entry: str
    uuid: str


class Devices(NamedTuple):
    """The devices that the run may use.

    Attributes:
        kind: "cpu" or "cuda".
        slots: the number of ranks that may run at a time.
        gpus: the GPUs of this node.
        giver: what decided on ``slots``, for messages.
        in_process: whether the one rank is pytest's own process (``--gt-one-rank``).
    """

    kind: str
    slots: int
    gpus: tuple[Gpu, ...] = ()
    giver: str = "--gt-gpus gives"
    in_process: bool = False

    @property
    def backend(self) -> str:
        """The process group backend of ranks on these devices."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def __str__(self) -> str:
        by = ""
        if self.giver.startswith("torchrun"):
            by = ", started by torchrun"
        elif self.in_process:
            by = ", in this process: no order of ranks shows"
        if self.kind == "cuda":
            return f"{counted(self.slots, 'CUDA rank')} (nccl){by}"
        return f"{counted(self.slots, 'CPU rank')} (gloo){by}, no GPU used"


BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Makes CUDA count GPUs as NVML and nvidia-smi do; by default the fastest kind is first."""


def visible_gpus(*, to_lease: bool = True) -> tuple[Gpu, ...]:
    """Return the GPUs that NVML finds and ``CUDA_VISIBLE_DEVICES`` leaves.

    Raises:
        pytest.UsageError: ``to_lease`` is set, so runs must agree on which GPU is which, and the
            variable counts GPUs of several kinds in CUDA's own order.
    """
    present = _nvml_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    kinds = dict.fromkeys(kind for _, kind in present)
    is_counted = any(entry.strip().isdecimal() for entry in (visible or "").split(","))
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == BUS_ORDER["CUDA_DEVICE_ORDER"]
    if to_lease and is_counted and len(kinds) > 1 and not by_bus:
        raise pytest.UsageError(
            f"CUDA_VISIBLE_DEVICES={visible} counts GPUs of several kinds ({', '.join(kinds)}), "
            "and CUDA puts the fastest kind first: set CUDA_DEVICE_ORDER=PCI_BUS_ID, "
            "to count them as nvidia-smi does, or name them by UUID"
        )
    return confined([uuid for uuid, _ in present], visible)


def confined(uuids: Sequence[str], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves of ``uuids``, which are in bus order.

    CUDA's rules: an entry is an index or the beginning of a UUID; the list ends at the first entry
    that is not a device.
    """
    if visible is None:
        return tuple(Gpu(str(index), uuid) for index, uuid in enumerate(uuids))
    found: dict[str, Gpu] = {}
    for entry in map(str.strip, visible.split(",")):
        if entry.isdecimal():
            matches = list(uuids[int(entry) : int(entry) + 1])
        elif entry.startswith("MIG-"):
            # A part of a GPU: NVML lists it below the GPU, not among the devices.
            matches = [entry] if uuids else []
        else:
            matches = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if len(matches) != 1 or matches[0] in found:
            break
        found[matches[0]] = Gpu(entry, matches[0])
    return tuple(found.values())


def _nvml_gpus() -> list[tuple[str, str]]:
    """Return UUID and kind of each GPU, in the order of the bus.

    They come from the driver's library, which starts no CUDA context.
    """
    import ctypes  # only where GPUs are looked for

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
            device = ctypes.c_void_p()
            uuid = ctypes.create_string_buffer(96)
            kind = ctypes.create_string_buffer(96)
            # A call that fails leaves its buffer empty.
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                nvml.nvmlDeviceGetUUID(device, uuid, len(uuid))
                nvml.nvmlDeviceGetName(device, kind, len(kind))
            gpus.append((uuid.value.decode() or f"GPU-without-uuid-{index}", kind.value.decode()))
        return gpus
    finally:
        nvml.nvmlShutdown()


_RESOLVED = pytest.StashKey[tuple[list[str | None], Devices]]()


def resolve(config: pytest.Config) -> Devices:
    """Return the devices that ``--gt-gpus`` and ``--gt-device`` leave.

    Raises:
        pytest.UsageError: the options ask for more than there is.
    """
    # Every test calls this: the driver is asked again only if a variable has changed.
    variables = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")]
    known = config.stash.get(_RESOLVED, None)
    if known is None or known[0] != variables:
        found = _resolve(config)
        if options.get(config, "one-rank"):
            found = Devices(found.kind, 1, found.gpus[:1], "--gt-one-rank gives", in_process=True)
        config.stash[_RESOLVED] = known = variables, found
    return known[1]


def _resolve(config: pytest.Config) -> Devices:
    promised: int | None = options.get(config, "gpus")
    wanted: str = options.get(config, "device")
    launch = launch_of(config)
    gpus = () if wanted == "cpu" else visible_gpus(to_lease=launch is None)
    if not gpus and wanted == "cuda":
        raise pytest.UsageError("--gt-device=cuda: no GPU is visible; use --gt-device=cpu, or auto")
    if launch is not None:
        # The slots are the ranks of all nodes, and the GPUs those of this one.
        if promised is not None and promised > launch.size:
            raise pytest.UsageError(
                f"--gt-gpus={promised}: torchrun has started {launch.size} ranks; "
                f"promise at most {launch.size}, or have torchrun start more"
            )
        if gpus and len(gpus) < launch.local_size:
            raise pytest.UsageError(
                f"torchrun has started {launch.local_size} ranks on a node where {len(gpus)} GPUs "
                "are visible; start as many as there are GPUs, or use --gt-device=cpu"
            )
        kind = "cuda" if gpus else "cpu"
        return Devices(kind, promised or launch.size, gpus, "torchrun has started")

    if not gpus:
        return Devices("cpu", promised or DEFAULT_CPU_SLOTS)
    if promised is not None and promised > len(gpus):
        raise pytest.UsageError(
            f"--gt-gpus={promised}: only {len(gpus)} GPUs are visible; "
            f"promise at most {len(gpus)}, or use --gt-device=cpu"
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


class Launch(NamedTuple):
    """The place of this process among all that torchrun has started, and among its node's."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def leads(self) -> bool:
        """True for the process that owns the tests and reports for all."""
        return self.rank == 0


def launch_in(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that environment variables describe, None without torchrun."""
    if not all(name in environ for name in _OF_TORCHRUN):
        return None
    return Launch(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_size=int(environ["LOCAL_WORLD_SIZE"]),
    )


def launch_of(config: pytest.Config) -> Launch | None:
    """Return the launch of this process; None without torchrun, and in the session of a rank."""
    if _LAUNCH not in config.stash:
        config.stash[_LAUNCH] = None if hasattr(config, "workerinput") else launch_in(os.environ)
    return config.stash[_LAUNCH]


def check_launch(config: pytest.Config) -> None:
    """Raise pytest.UsageError for options that do not work under torchrun."""
    launch = launch_of(config)
    if launch is None:
        return
    if options.get(config, "one-rank"):
        raise pytest.UsageError("--gt-one-rank: torchrun has started ranks; run pytest without it")
    if config.getoption("tx", None) or config.getoption("numprocesses", None):
        raise pytest.UsageError(
            f"torchrun has started the {launch.size} ranks of this run, and xdist would start "
            "processes of its own: leave out -n and --dist"
        )
