"""Arithmetics: run a program on symbolic values beside its real numbers.

A program, eager or a graph, computes with real numbers. In an arithmetic its *abstract* tensors
have *elements* beside them; a tensor without elements is *known*, as a constant is:

- ``terms``: an element is a fingerprint of the expression that makes it;
- ``field``: an element is a number modulo a prime.

Equal elements mean the same bits for any numbers, or the same function in any order of additions.
``operators`` is the one table that says what kind each aten operator is, ``mode`` follows a
program.

Sources: Schwartz (1980) and Zippel (1979) for identity by random elements; Mirage (Wu et al., OSDI
2025) for fields as a check of kernels.
"""
