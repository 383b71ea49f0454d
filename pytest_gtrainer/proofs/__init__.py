"""Proofs: which kind of equal two programs are.

``prove`` runs both in one arithmetic after the other, from the strictest on, until their results
are equal. ``programs`` runs them, ``inputs`` makes up what they are given, ``origin`` finds the
first value of one that the other never makes, and ``proof`` says it. Where ranks are ``alike`` one
runs for all; ``on_ranks`` moves elements between real ranks, and ``contexts`` has the blocks in
which any code computes.
"""
