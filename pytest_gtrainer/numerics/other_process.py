"""A run of a function in another process, from the random states and under the switches of this one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pytest_gtrainer.numerics.configs import DebugConfig
from pytest_gtrainer.numerics.determinism import active, deterministic
from pytest_gtrainer.numerics.pressures import Function, Kept, NotJudged, kept
from pytest_gtrainer.numerics.seeds import RandomStates

PROCESS_LIMIT = 300.0

_CHILD = """
import pickle, sys
sys.path[:] = pickle.loads(bytes.fromhex(sys.argv[1]))
import torch
from pytest_gtrainer.numerics.other_process import _answer
_answer(sys.argv[2])
"""


def in_another_process(function: Function) -> Kept:
    """A new Python, with another order of sets and other addresses, from the same random states and switches."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise NotJudged("another process is no rank of this world")
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(_pickled(function))
        command = [sys.executable, "-c", _CHILD, pickle.dumps(sys.path).hex(), str(call)]
        environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_LIMIT, env=environment)
        if done.returncode:
            raise RuntimeError(f"the run in another process failed:\n{done.stderr}")
        answer: Kept = torch.load(call.with_suffix(".answer"), weights_only=True)
        return answer


def _set_algorithms(mode: int) -> None:
    """Of torch's two ways to say it the one that Inductor hears."""
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


# What a run takes from its process beside random numbers and what ``deterministic`` sets: how to read and to set it.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "algorithms": (torch.get_deterministic_debug_mode, _set_algorithms),
}


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a run in another process starts from."""

    random: RandomStates
    switches: dict[str, Any]
    settings: tuple[DebugConfig, str] | None

    @classmethod
    def here(cls) -> _Start:
        random = replace(RandomStates.now(), waiting={})  # those are functions; and for a CUDA that no run has started
        block = active()
        switches = {name: read() for name, (read, _) in _SWITCHES.items()}
        return cls(random, switches, None if block is None else (block.config, block.nccl))

    @contextmanager
    def there(self) -> Iterator[None]:
        """Inside, the process that this arrived in has the same switches and random numbers."""
        with contextlib.ExitStack() as stack:
            if self.settings is not None:
                config, nccl = self.settings
                stack.enter_context(deterministic(config, nccl=nccl))
            for name, (read, write) in _SWITCHES.items():
                if read() != self.switches[name]:
                    write(self.switches[name])
            self.random.put_back()
            yield


def _pickled(function: Function) -> bytes:
    module_name, qualname = _importable(function)
    file = getattr(sys.modules[module_name], "__file__", None)
    return pickle.dumps((module_name, file, _Start.here(), qualname))


def _importable(function: Function) -> tuple[str, str]:
    """Module and name by which another process finds the function."""
    module_name, qualname = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found: Any = None if module_name == "__main__" else sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not function:
        name = qualname or repr(function)
        raise NotJudged(f"another process cannot import {name}: define it with def at the top level of a module")
    return module_name, qualname


def _answer(path: str) -> None:
    """In the other process: import the module by its file, run the function, leave its result."""
    module_name, file, start, qualname = pickle.loads(Path(path).read_bytes())
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    function: Any = module
    for part in qualname.split("."):
        function = getattr(function, part)
    with start.there():
        torch.save(kept(function()), Path(path).with_suffix(".answer"))
