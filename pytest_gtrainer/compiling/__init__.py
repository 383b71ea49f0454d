"""The recorder of torch.compile: every graph on its way through Dynamo, AOTAutograd and Inductor.

``recorder`` watches, ``record`` is what it leaves and what can be asserted about it, ``bitwise`` runs a graph before
and after a pass. Open ``record`` first.
"""
