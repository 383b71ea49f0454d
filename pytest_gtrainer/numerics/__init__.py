"""Bits, not closeness: digests, records of runs, comparison and the switches of determinism.

=========================  ============================================================================
:mod:`.bits`               the raw bytes of a tensor, and one element as a person reads it
:mod:`.ulp`                distance of two floats in units in the last place
:mod:`.names`              names without the prefixes of wrappers
:mod:`.entries`            the named tensors of anything: tensor, mapping, sequence, module
:mod:`.digest`             one string that stands for names, dtypes, shapes and bytes
:mod:`.mixing`             a hash in torch's own operators, for tensors that should stay where they are
:mod:`.weight_digests`     one line a step instead of every tensor
:mod:`.record`             what a training run left behind, by step, rank, phase and name
:mod:`.record_file`        records on disk, mapped
:mod:`.compare`            two of them: equal, different at its origin, or unverified
:mod:`.verdict_text`       a verdict for a terminal, and as a table
:mod:`.assertions`         the same as assertions, and the twin that must differ
:mod:`.operators`          the first operator whose output differs
:mod:`.bisect`             the pass of a pipeline that changes a bit, and the node where it begins
:mod:`.bisect_on_failure`  the same for a comparison that fails
:mod:`.run_to_run`         the same bits again, under pressure
:mod:`.pressures`          what a result must not depend on, changed around a run; :mod:`.other_process` is one
:mod:`.sweep`              every combination of settings, and what is claimed about it
:mod:`.loss_balance`       the mean over all tokens of ranks that have different numbers of them
:mod:`.configs`            what a trainer is told about determinism
:mod:`.determinism`        every switch of determinism, set and restored whole
:mod:`.knobs`              the table of these switches
:mod:`.nccl`               settings of NCCL that projects call deterministic
:mod:`.seeds`              seeds and random states
=========================  ============================================================================

Nothing here imports pytest. The order of arguments is ``(actual, expected)`` everywhere,
as in ``torch.testing.assert_close``.
"""
