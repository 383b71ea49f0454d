"""Goldens: one file, one writer, reviewed by people.

- ``check`` is the ``gt_golden`` fixture; ``values`` makes texts of numbers, ``environment`` says what they
  depend on.
- ``naming`` says where a golden lies, ``compare`` judges a text against it, ``store`` reads and writes files.
- ``plugin`` has the hooks, ``modes`` says what the run may write, ``artifacts`` keeps what failures obtained.
- ``unused`` finds what no test checks, by the ``evidence`` of a run of all tests (``coverage``) and the
  ``tree`` of files.
- ``inline`` does the same for expectations in source files.

Nothing here imports torch, but for rendering a graph and for the environment of numbers.

Terms: a *claim* is a text that a test says its golden should hold; in a rank it is only
recorded, and judged by the parent.
"""
