"""Real ranks: one process a rank, kept warm between tests; gloo on CPU, NCCL on GPUs.

In: a test whose marker asks for ranks. Out: a report for each phase, as plain pytest would give it,
that says which rank failed first, why, and what the others did. Read ``plugin`` first, then the
files in the order in which a test passes through them:

- ``plugin``: runs the test in place of pytest's own protocol. It sends the test to a team of ranks,
  and gives pytest the merged reports;
- ``pool``, ``leases``: find a warm team for the test's world, on devices that other processes want,
  too;
- ``team``, ``forkserver``: start ranks, and talk to them from the parent; ``wire``: the messages;
- ``inside/``: the rank itself. ``rank`` runs one command after the other, ``session`` is its small
  pytest session;
- ``watch``, ``answers``: end a test of which a rank has failed or is stuck, and say where each rank
  stands and what it waits for;
- ``inside/debugger``: pdb in a rank, on the terminal that ``watch`` lends it;
- ``merge``: makes the reports that pytest gets from those of the ranks;
- ``caller``: ``gt_ranks``, for a test that stays in the parent and calls functions on ranks;
- ``torchrun/``: the same with ranks on every node that torchrun has started.
"""
