"""The same tests under ``torchrun … -m pytest``: torch's launcher has started the ranks, on one machine or many."""
