"""Trace a model into one joint graph of forward, loss and backward, and run it as a step.

``model`` names modules on nodes and lists the state, ``sharding`` turns parameters into sharded
ones that gather on access, ``step`` traces and replays: start there. Nothing here imports pytest.
"""
