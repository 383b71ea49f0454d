"""References: the same training run, by eager FSDP2 and by a rewritten graph, from one
configuration.
"""
