"""The simulated world: all ranks in one process, true values, sums in the order of a multi-node ring."""
