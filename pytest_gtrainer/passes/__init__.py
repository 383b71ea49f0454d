"""Passes over a joint forward and backward graph: ``(gm, example_inputs, *, options) -> gm``.

They read the metadata conventions of graph trainers (``graph.nodes``), so graphs traced elsewhere
go straight in. Start at ``graph_pass``, which defines a pass, then read ``pipeline``, which runs
them in order. Nothing here imports pytest.
"""
