"""Bits, not closeness: digests, records of runs, comparison and the switches of determinism.

========================  ===============================================================
:mod:`.bits`              the raw bytes of a tensor, and one element as a person reads it
:mod:`.ulp`               distance of two floats in units in the last place
:mod:`.names`             names without the prefixes of wrappers
:mod:`.entries`           the named tensors of anything: tensor, mapping, sequence, module
:mod:`.digest`            one string that stands for names, dtypes, shapes and bytes
:mod:`.record`            what a training run left behind, by step, rank, phase and name
:mod:`.compare`           two of them: equal, different at its origin, or unverified
:mod:`.verdict_text`      a verdict for a terminal
:mod:`.assertions`        the same as assertions, and the twin that must differ
:mod:`.determinism`       every switch of determinism, set and restored whole
========================  ===============================================================

Nothing here imports pytest. The order of arguments is ``(actual, expected)`` everywhere,
as in ``torch.testing.assert_close``.
"""
