"""Bits, not closeness: digests, records of runs, comparison and the switches of determinism.

Tensors come in; a verdict, a digest or a record goes out. First file: :mod:`.compare`. Nothing here
imports pytest. The order of arguments is ``(actual, expected)`` everywhere, as in
``torch.testing.assert_close``.
"""
