"""The recorder of torch.compile: every graph on its way through Dynamo, AOTAutograd and Inductor.

``recorder`` fills a ``record``, which has assertions. ``bitwise`` runs a graph before and after a
pass. ``proving`` says which kind of equal stages are, ``accuracy`` compares the errors of compiled
code with those of eager. ``inductor`` makes passes of graph trainers passes of Inductor. Open
``record`` first.
"""
