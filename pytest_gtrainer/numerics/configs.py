"""What a trainer is told about determinism: two small configurations, each passed to what needs it and nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class DebugConfig:
    """What makes a training run repeatable.

    Attributes:
        seed: for Python, NumPy and torch.
        deterministic: use deterministic algorithms, refuse operators that have none.
        deterministic_warn_only: warn about such operators instead.
        moe_force_load_balance: route tokens to experts in turn; read by the models.
    """

    seed: int = 0
    deterministic: bool = True
    deterministic_warn_only: bool = False
    moe_force_load_balance: bool = False


@dataclass(frozen=True, slots=True)
class ActivationCheckpointConfig:
    """How ``torch.utils.checkpoint`` recomputes; the fields are its arguments.

    Attributes:
        preserve_rng_state: recompute with the random numbers of the forward; without it dropout recomputes
            another mask, and what comes after the region draws other numbers.
        determinism_check: "default" compares shapes, dtypes and devices of what was recomputed, "none" nothing.
        debug: on a mismatch, show the operators of both runs.
    """

    preserve_rng_state: bool = True
    determinism_check: Literal["default", "none"] = "default"
    debug: bool = False

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``torch.utils.checkpoint.checkpoint``.

        >>> ActivationCheckpointConfig(debug=True).arguments()
        {'use_reentrant': False, 'preserve_rng_state': True, 'determinism_check': 'default', 'debug': True}
        """
        return {"use_reentrant": False, **asdict(self)}


def flex_attention_options(config: DebugConfig) -> dict[str, bool]:
    """``torch.compile(flex_attention, options=...)``: tuned by measuring, unless it has to be deterministic (K2).

    Options of a compiled function win over Inductor's own configuration, which is why a model that
    compiles FlexAttention takes them from here.

    >>> flex_attention_options(DebugConfig())
    {'max_autotune': False, 'coordinate_descent_tuning': False}
    """
    tuned = not config.deterministic
    return {"max_autotune": tuned, "coordinate_descent_tuning": tuned}
