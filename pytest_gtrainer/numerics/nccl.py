"""Settings of NCCL that public projects call deterministic, by name.

They contradict each other: one forces rings and another trees, one pins a single channel and another
leaves channels alone. Each makes a run repeat itself on one system; none gives the bits of another, and
none is ours. NCCL itself promises the same bits for the same topology, sizes and settings, so a run may well
repeat without any of them. NCCL reads its variables when a communicator is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NCCL_PRESETS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "as_found": MappingProxyType({}),
    # Megatron-LM --deterministic-mode demands that NCCL_ALGO is one of Tree, Ring, CollnetDirect, CollnetChain, ^NVLS;
    # its users mostly choose Ring, as slime and Primus do.
    "megatron_ring": MappingProxyType({"NCCL_ALGO": "Ring"}),
    "megatron_no_nvls": MappingProxyType({"NCCL_ALGO": "^NVLS"}),
    # SGLang --enable-deterministic-inference: trees, and for all-reduce only.
    "sglang_tree": MappingProxyType({"NCCL_ALGO": "allreduce:tree"}),
    # vLLM batch_invariant.override_envs_for_invariance: trees, one channel, one protocol.
    "vllm_batch_invariant": MappingProxyType({
        "NCCL_LAUNCH_MODE": "GROUP",
        "NCCL_COLLNET_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_P2P_NET_DISABLE": "1",
        "NCCL_MIN_NCHANNELS": "1",
        "NCCL_MAX_NCHANNELS": "1",
        "NCCL_PROTO": "Simple",
        "NCCL_ALGO": "allreduce:tree",
        "NCCL_NTHREADS": "1",
        "NCCL_SOCKET_NTHREADS": "1",
    }),
})  # fmt: skip
"""Environment variables by the name of the preset; ``as_found`` sets nothing."""


def nccl_preset(name: str) -> Mapping[str, str]:
    """The environment variables of a preset.

    Raises:
        ValueError: no preset of that name.

    >>> dict(nccl_preset("megatron_ring")), dict(nccl_preset("sglang_tree"))
    ({'NCCL_ALGO': 'Ring'}, {'NCCL_ALGO': 'allreduce:tree'})
    """
    if name not in NCCL_PRESETS:
        raise ValueError(f"there is no NCCL preset {name!r}: choose one of {', '.join(NCCL_PRESETS)}")
    return NCCL_PRESETS[name]
