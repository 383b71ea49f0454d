"""The doctor: what this installation can do, ``python -m pytest_gtrainer doctor``.

``contract`` reads in our source what we need of torch and pytest, ``examination`` looks for it in those that are
installed, ``parts`` tells which of our modules stand on what is missing, ``report`` writes all that on one screen.
Nothing here imports torch before it is looked at, and nothing of ours that does.
"""
