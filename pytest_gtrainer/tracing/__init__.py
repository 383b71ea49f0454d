"""From a model to one joint graph of forward, loss and backward, and back to a training step.

``fqns`` annotates nodes with module names, ``sharding`` turns parameters into sharded ones
that gather on access, ``step`` traces, ``replay`` runs. Nothing here imports pytest.
"""
