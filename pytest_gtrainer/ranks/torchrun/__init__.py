"""Ranks on every node of a ``torchrun … -m pytest``, for the one pytest session of rank 0.

On rank 0's node they are forked as without torchrun. On another node its first process forks them
(``follower``); rank 0 holds a connection to it (``nodes``), on which everything is signed and
nothing can execute (``line``). The other processes that torchrun has started wait for the end.
"""
