"""Proofs: which kind of equal two programs are.

``prove`` runs both programs in several arithmetics, the strictest first, until their results are
equal. ``programs`` runs them on ``inputs``, ``origin`` finds the first value that only one of them
computes, and ``proof`` is the report. If all ranks are ``alike``, one runs for all; ``on_ranks``
moves elements between real ranks. ``contexts`` has context managers that compute any code in an
arithmetic.
"""
