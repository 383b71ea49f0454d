"""Set up what this repository wants of a run."""

import logging

# DTensor warns that it gathers a weight in two steps, one for ``dp`` and one for ``tp``. Only the
# comparison with the unsharded model gathers weights, so nobody waits for it.
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
