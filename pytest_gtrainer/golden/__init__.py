"""Goldens: one file, one writer, reviewed by people.

``naming`` says where a golden lies, ``store`` reads and writes files, ``compare`` judges a text
against a file, ``words`` says what differs, ``check`` is the ``gt_golden`` fixture, ``plugin``
the hooks. None of them imports torch, except to render a graph.

Terms: a *claim* is a text that a test says its golden should hold; in a rank it is only
recorded, and judged by the parent.
"""
