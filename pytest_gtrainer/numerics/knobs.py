"""Every global switch of torch that decides whether a run repeats, or which bits it gives: one table.

Of it are made what ``deterministic`` sets and reports, the guard against tests that leak a flag, and the table in
``docs/determinism.md``. Reading a knob imports nothing: of a module that is not loaded there is no value.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

_RANDOMNESS = "torch: notes/randomness"
_ACCURACY = "torch: notes/numerical_accuracy"
_BACKENDS = "torch: backends"
_CUDA_NOTES = "torch: notes/cuda"
_ATTENTION = "torch: nn.functional.scaled_dot_product_attention"
_INDUCTOR = "torch: torch/_inductor/config.py"
_CUBLAS = "NVIDIA: cuBLAS, results reproducibility"
_NCCL = "NVIDIA: NCCL, environment variables"
_THREADS = "torch: notes/cpu_threading_torchscript_inference"

NOT_LOADED = "not loaded"


@dataclass(frozen=True, slots=True)
class Knob:
    """One switch, ``module:attribute``, ``()`` behind it if it is called, or an environment variable ``$NAME``.

    ``setting`` is what ``deterministic`` makes of it, empty if nothing. No test may leave a ``guarded`` one changed.
    """

    path: str
    devices: str
    setting: str
    effect: str
    documented: str
    guarded: bool = True

    @property
    def name(self) -> str:
        """As a person writes it: ``torch.backends.cudnn.enabled``, ``NCCL_ALGO``."""
        return self.path.removeprefix("$").replace(":", ".")

    @property
    def is_variable(self) -> bool:
        """Whether it is an environment variable."""
        return self.path.startswith("$")

    def read(self) -> Any:
        """The value in effect; ``NOT_LOADED`` while its module is not imported, None for an unset variable."""
        if self.is_variable:
            return os.environ.get(self.name)
        home, _, attribute = self.path.partition(":")
        if home not in sys.modules:
            return NOT_LOADED
        try:
            value = attrgetter(attribute.removesuffix("()"))(sys.modules[home])
            return value() if attribute.endswith("()") else value
        except RuntimeError as error:  # two ways to set a precision that were mixed cannot be read
            return f"cannot be read: {str(error).splitlines()[0]}"


def _all(home: str, paths: str, devices: str, effect: str, documented: str) -> Iterable[Knob]:
    """Knobs that are left alone, by their paths; of one without a module it is ``home``."""
    return (Knob(p if ":" in p else f"{home}:{p}", devices, "", effect, documented) for p in paths.split())


KNOBS: tuple[Knob, ...] = (
    Knob("torch:are_deterministic_algorithms_enabled()", "CPU, CUDA", "True",
         "deterministic algorithms; operators without one raise", _RANDOMNESS),
    Knob("torch:is_deterministic_algorithms_warn_only_enabled()", "CPU, CUDA", "deterministic_warn_only",
         "warn about operators without one instead", _RANDOMNESS),
    Knob("torch.utils.deterministic:fill_uninitialized_memory", "CPU, CUDA", "",
         "`empty` gives NaN under deterministic algorithms; torch's default is on", _RANDOMNESS),
    Knob("torch.backends.cudnn:deterministic", "CUDA", "True", "cuDNN's deterministic convolutions", _RANDOMNESS),
    Knob("torch.backends.cudnn:benchmark", "CUDA", "False", "cuDNN chooses kernels by measuring them", _RANDOMNESS),
    Knob("torch.backends.cudnn:benchmark_limit", "CUDA", "", "how many kernels it measures: see above", _BACKENDS),
    Knob("torch.backends.cudnn:depthwise_kernel", "CUDA", "", "which kernel; other bits, each repeats", _BACKENDS),
    Knob("torch.backends.cudnn:enabled", "CUDA", "", "other kernels, other bits; both repeat", _BACKENDS),
    Knob("torch.backends.mkldnn:deterministic", "CPU", "True", "oneDNN's deterministic kernels", _BACKENDS),
    Knob("torch.backends.mkldnn:enabled", "CPU", "", "other kernels, other bits; both repeat", _BACKENDS),
    Knob("$CUBLAS_WORKSPACE_CONFIG", "CUDA", ":4096:8, or as found if :16:8",
         "without it cuBLAS may split sums differently in several streams; read once, at the first product; "
         "`torch.backends.cuda.cublas_workspace_size` overrules it", _CUBLAS),
    Knob("torch._inductor.config:deterministic", "CPU, CUDA", "True",
         "compiled code is not chosen by measuring", _INDUCTOR),
    Knob("torch._inductor.config:max_autotune", "CPU, CUDA", "False",
         "kernels chosen by measuring, FlexAttention's among them", _INDUCTOR),
    Knob("torch._inductor.config:max_autotune_pointwise", "CUDA", "False", "the same, pointwise", _INDUCTOR),
    Knob("torch._inductor.config:max_autotune_gemm", "CPU, CUDA", "False", "the same, matrix products", _INDUCTOR),
    Knob("torch._inductor.config:coordinate_descent_tuning", "CUDA", "False",
         "launch parameters tuned by measuring, FlexAttention's among them", _INDUCTOR),
    Knob("$TORCHINDUCTOR_DETERMINISTIC", "CPU, CUDA", "1", "the same, for an Inductor that is loaded later", _INDUCTOR),
    Knob("$TORCHINDUCTOR_MAX_AUTOTUNE", "CPU, CUDA", "0", "the same", _INDUCTOR),
    Knob("$TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE", "CUDA", "0", "the same", _INDUCTOR),
    Knob("$TORCHINDUCTOR_MAX_AUTOTUNE_GEMM", "CPU, CUDA", "0", "the same", _INDUCTOR),
    Knob("$TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "CUDA", "0", "the same", _INDUCTOR),
    *_all("torch._inductor.config", "benchmark_fusion benchmark_combo_kernel shape_padding", "CUDA",
          "fusions and paddings chosen by measuring, which Inductor does not do while it is `deterministic`",
          _INDUCTOR),
    Knob("torch._inductor.config:batch_invariant", "CUDA", "",
         "one kernel for all batch sizes: about equality between batches, not between runs", _INDUCTOR),
    Knob("torch._inductor.config:fallback_random", "CPU, CUDA", "",
         "compiled code draws eager's random numbers: about equality with eager, not between runs", _INDUCTOR),
    *_all("torch._inductor.config",
          "emulate_precision_casts emulate_precision_casts_on_saved_tensors eager_numerics.division_rounding "
          "eager_numerics.disable_ftz eager_numerics.use_pytorch_libdevice", "CUDA",
          "fused code rounds where eager rounds: about equality with eager", _INDUCTOR),
    *_all("torch._inductor.config", "use_fast_math split_reductions", "CUDA",
          "other bits of compiled code, each repeats", _INDUCTOR),
    *_all("torch._inductor.config", "cpp.threads cpp.dynamic_threads cpp.simdlen "
          "cpp.enable_floating_point_contract_flag cpp.enable_unsafe_math_opt_flag", "CPU",
          "threads, vectors and contractions of compiled code: other bits, each repeats", _INDUCTOR),
    *_all("torch.backends", "fp32_precision torch.backends.cudnn:fp32_precision "
          "torch.backends.cudnn:conv.fp32_precision torch.backends.cudnn:rnn.fp32_precision "
          "torch.backends.cuda:matmul.fp32_precision torch.backends.mkldnn:fp32_precision "
          "torch.backends.mkldnn:matmul.fp32_precision torch.backends.mkldnn:conv.fp32_precision "
          "torch.backends.mkldnn:rnn.fp32_precision torch:get_float32_matmul_precision()", "CPU, CUDA",
          "TF32 or bf16 inside fp32 products; each repeats", _CUDA_NOTES),
    *_all("torch.backends.cuda", "matmul.allow_fp16_reduced_precision_reduction "
          "matmul.allow_bf16_reduced_precision_reduction matmul.allow_fp16_accumulation", "CUDA",
          "partial sums in half precision; each repeats", _ACCURACY),
    *_all("torch.backends.cuda", "flash_sdp_enabled() mem_efficient_sdp_enabled() math_sdp_enabled() "
          "cudnn_sdp_enabled() fp16_bf16_reduction_math_sdp_allowed()", "CUDA",
          "which attention kernel; their backwards heed deterministic algorithms", _ATTENTION),
    Knob("torch.nn.attention:current_flash_attention_impl()", "CUDA", "",
         "which flash attention, None is torch's own; other bits, each repeats", "torch: nn.attention"),
    *_all("torch.backends.cuda", "preferred_blas_library() preferred_linalg_library()", "CUDA",
          "which library; other bits, each repeats", _BACKENDS),
    *_all("torch.backends.opt_einsum", "enabled strategy torch.backends.mha:get_fastpath_enabled()", "CPU, CUDA",
          "order of products, fused path; each repeats", _BACKENDS),
    Knob("torch:get_default_dtype()", "CPU, CUDA", "", "dtype of new tensors", "torch: set_default_dtype"),
    Knob("torch:is_grad_enabled()", "CPU, CUDA", "", "left off by a test it silences every later one",
         "torch: set_grad_enabled"),
    Knob("torch:is_anomaly_enabled()", "CPU, CUDA", "", "slow, the same bits", "torch: autograd"),
    Knob("torch:get_num_threads()", "CPU", "",
         "sums are cut by thread: other bits for another number, which `assert_run_to_run` tries", _THREADS),
    Knob("torch:get_num_interop_threads()", "CPU", "", "fixed once work has started", _THREADS, guarded=False),
    *(Knob(f"${name}", "CPU", "", effect, documented, guarded=False) for name, effect, documented in (
        ("OMP_NUM_THREADS", "default of the number of threads; read when torch loads", _THREADS),
        ("MKL_NUM_THREADS", "the same for MKL", _THREADS),
        ("OMP_DYNAMIC", "true lets the runtime take fewer threads, by load; off by default", "OpenMP: environment "
         "variables"),
        ("MKL_DYNAMIC", "the same for MKL, where it is on by default", "Intel: oneMKL, MKL_DYNAMIC"),
        ("MKL_CBWR", "MKL's own mode of reproducible results; read when MKL starts", "Intel: oneMKL, conditional "
         "numerical reproducibility"),
        ("ATEN_CPU_CAPABILITY", "which vector instructions; other bits, each repeats", "torch: torch/backends/cpu"),
        ("ONEDNN_MAX_CPU_ISA", "the same for oneDNN", "Intel: oneDNN, CPU dispatcher control"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "bf16 inside fp32 products; each repeats", "Intel: oneDNN, fpmath mode"),
        ("PYTHONHASHSEED", "order of sets of strings; read when Python starts", "Python: command line"),
    )),
    *(Knob(f"${name}", "CUDA", "by preset", effect, _NCCL) for name, effect in (
        ("NCCL_ALGO", "rings or trees: the order of a sum; read when a communicator is made"),
        ("NCCL_PROTO", "protocol; with rings the same order of a sum"),
        ("NCCL_MIN_NCHANNELS", "how a payload is cut, and so which ring sums an element"),
        ("NCCL_MAX_NCHANNELS", "the same"),
        ("NCCL_NVLS_ENABLE", "sums in the switch, in fp32"),
        ("NCCL_COLLNET_ENABLE", "sums in the network"),
        ("NCCL_LAUNCH_MODE", "how kernels start"),
        ("NCCL_P2P_NET_DISABLE", "how GPUs of a node reach each other"),
        ("NCCL_NTHREADS", "threads of a block"),
        ("NCCL_SOCKET_NTHREADS", "threads of a socket"),
    )),
    *(Knob(f"${name}", "CUDA", "", effect, documented, guarded=False) for name, effect, documented in (
        ("PYTORCH_TUNABLEOP_ENABLED", "1 chooses kernels of products by measuring; off by default; read at the first",
         "torch: cuda.tunable"),
        ("TORCH_BLAS_PREFER_CUBLASLT", "which library; other bits, each repeats; read when torch loads", _BACKENDS),
        ("CUBLASLT_WORKSPACE_SIZE", "other bits, each repeats; read at the first product", _CUDA_NOTES),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TF32 inside fp32 products; read when torch loads", _CUDA_NOTES),
    )),
    Knob("$NVIDIA_TF32_OVERRIDE", "CUDA", "", "0 forbids TF32 everywhere; read when CUDA starts", _CUDA_NOTES,
         guarded=False),
    Knob("$CUDA_LAUNCH_BLOCKING", "CUDA", "", "no overlap of kernels; finds races, does not remove them", _CUDA_NOTES,
         guarded=False),
    Knob("$NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUDA", "", "Transformer Engine's own switch: 0 is deterministic",
         "NVIDIA: Transformer Engine, environment variables"),
)  # fmt: skip
"""The table, in the order in which it is reported."""


def values(knobs: Iterable[Knob] = KNOBS) -> dict[str, Any]:
    """What is in effect, by name."""
    return {knob.name: knob.read() for knob in knobs}


def flags(home: str) -> dict[str, bool]:
    """The attributes of a module that ``deterministic`` sets to True or False."""
    own = (knob for knob in KNOBS if knob.path.startswith(f"{home}:") and knob.setting in ("True", "False"))
    return {knob.path.partition(":")[2]: knob.setting == "True" for knob in own}


def table() -> str:
    """The table as Markdown."""
    rows = ["| knob | concerns | `deterministic` sets | what it decides | documented in |", "|---|---|---|---|---|"]
    for knob in KNOBS:
        setting = f"`{knob.setting}`" if knob.setting else "left alone"
        rows.append(f"| `{knob.name}` | {knob.devices} | {setting} | {knob.effect} | {knob.documented} |")
    return "\n".join(rows)
