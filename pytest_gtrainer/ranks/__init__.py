"""Real ranks: one process a rank, kept warm between tests; gloo on CPU, NCCL on GPUs.

In: a test whose marker asks for ranks. Out: one report a phase, as plain pytest would give it, that
says which rank failed first, why, and what the others did. Read ``plugin`` first, then the files in
the order of a test:

- ``plugin``: takes the test out of pytest's hands, sends it to a team, and gives pytest the merged
  reports;
- ``pool``, ``leases``: a warm team for its world, on devices that other processes want, too;
- ``team``, ``forkserver``: how ranks come to be, and what the parent holds of them; ``wire``: all
  that is said between;
- ``inside/``: the rank itself. ``rank`` obeys one command after the other, ``session`` is its small
  pytest session;
- ``watch``, ``answers``: no fault of a rank makes the others wait, where a stuck one stands, and
  for whom;
- ``inside/debugger``: a rank that is debugged has the terminal, which ``watch`` lends it;
- ``merge``: from what ranks said to the reports that pytest gets;
- ``caller``: ``gt_ranks``, for a test that stays in the parent and calls functions on ranks;
- ``torchrun/``: the same with ranks on every node that torchrun has started.
"""
