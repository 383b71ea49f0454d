"""Passes over a joint forward and backward graph: ``(gm, example_inputs, *, options) -> gm``.

They read the metadata conventions of graph trainers (``meta["custom"]["module_fqn"]``,
``meta["autograd_backward"]``), so graphs traced elsewhere go straight in. Nothing here
imports pytest.
"""
