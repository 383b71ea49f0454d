"""Bits, not closeness: digests, records of runs, comparison and the switches of determinism.

Tensors come in; a verdict, a digest or a record goes out. First file: :mod:`.compare`.

====================  ================================================================================
:mod:`.bits`          the raw bytes of a tensor; one element as a person reads it; distance in ULPs
:mod:`.record`        what a training run left behind, by step, rank, phase and name; its file
:mod:`.digest`        one string that stands for names, dtypes, shapes and bytes
:mod:`.verdict`       equal, different at its origin, or unverified; for a terminal, and as a table
:mod:`.compare`       how a verdict is made; the same as assertions, and the twin that must differ
:mod:`.operators`     the first operator whose output differs
:mod:`.run_to_run`    the same bits again, under pressure
:mod:`.sweep`         every combination of settings, and what is claimed about it
:mod:`.loss_balance`  the mean over all tokens of ranks that have different numbers of them
:mod:`.determinism`   every switch of determinism, set and restored whole; seeds
:mod:`.knobs`         the table of these switches
====================  ================================================================================

Nothing here imports pytest. The order of arguments is ``(actual, expected)`` everywhere,
as in ``torch.testing.assert_close``.
"""
