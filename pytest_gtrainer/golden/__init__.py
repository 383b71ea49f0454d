"""Goldens: one file, one writer, reviewed by people.

- ``check`` is the ``gt_golden`` fixture; ``values`` makes texts of numbers.
- ``naming`` says where a golden lies and what a claim is, ``compare`` judges a text against it,
  ``store`` reads and writes files.
- ``plugin`` has the hooks and says what the run may write, ``artifacts`` keeps what failures
  obtained.
- ``unused`` finds what no test checks, in a run of all tests.
- ``inline`` accepts expectations in source files, as goldens are accepted.

Nothing here imports torch, but for rendering a graph and for the environment of numbers.
"""
