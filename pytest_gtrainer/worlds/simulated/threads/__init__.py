"""The reference of a simulated world: eager code, unmodified, on threads as ranks.

*Ranks* are threads of one process, of which one runs at a time (``team``). Each has its own
``torch.distributed`` (``_torch.threads``), whose groups (``group``) hand every collective to a
*meeting*, where the last member carries it out for all (``collectives``).

- Runs as it is: ``fully_shard``, HSDP, expert parallelism, DDP, DTensor, distributed checkpoints,
  send and recv.
- Refused: tracing and compiling (``run``), and so FlexAttention; stores; threads of a rank that
  communicate; ``reduce``, and reductions and tensors that the net has no model for.
- Works differently: hooks on all modules of a process (``register_module_forward_hook``, the module
  tree of ``CommDebugMode``) see all ranks; a dispatch mode does not see collectives; torch's
  switches are shared. FSDP1 needs an accelerator.
"""

from pytest_gtrainer.worlds.simulated.threads.run import run_threads
from pytest_gtrainer.worlds.simulated.threads.team import NotOnThreads, Standstill, TimeLimit

__all__ = ["NotOnThreads", "Standstill", "TimeLimit", "run_threads"]
