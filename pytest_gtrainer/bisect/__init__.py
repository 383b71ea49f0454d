"""Which pass of a pipeline changes a bit.

A traced step, passes and inputs come in; a ``Bisection`` goes out. First file: ``search``; ``on_failure`` does the same
for a comparison that fails.
"""
