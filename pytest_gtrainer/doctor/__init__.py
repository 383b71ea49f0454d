"""The doctor: what this installation can do, ``python -m pytest_gtrainer doctor``.

``contract`` reads in our source what we need of torch and pytest, and looks for it in those that are installed.
``report`` writes on one screen what is missing, and which of our modules stand on it.
Nothing here imports torch before it is looked at, and nothing of ours that does.
"""
