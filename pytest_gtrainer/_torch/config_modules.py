"""Configuration modules of dynamo and Inductor: what a user has set.

``ConfigModule._config`` holds an entry a setting, whose ``user_override`` is what was set, a sentinel if nothing
was. Reading the setting itself takes 3 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ATTRIBUTES = {
    "torch.utils._config_module:ConfigModule": ("_config",),
    "torch.utils._config_module:_ConfigEntry": ("user_override",),
}


def override_of(module: Any, name: str) -> Callable[[], Any]:
    """What tells the user's value of a setting of a configuration module."""
    read: Callable[[], Any] = module._config[name].user_override.get
    return read
