"""Passes over a joint forward and backward graph: ``(gm, example_inputs, *, options) -> gm``.

They read the metadata conventions of graph trainers (``graph.nodes``), so graphs traced elsewhere go straight in. First
file: ``graph_pass``, what a pass is; then ``pipeline``, which ones run, in which order. Nothing here imports pytest.
"""
