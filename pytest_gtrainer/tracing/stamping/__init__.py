"""Deep models in seconds: trace four of many identical layers, stamp the rest out in the graph, and prove it.

A *run* is a stretch of a container (ModuleList, ModuleDict, Sequential) that repeats a *unit* of one to four layers.
The *cut* model has the first two and the last two units of each run; its second is the *template* that is copied.

- ``signature``: the layers of a run are alike as Python objects, so one does with like arguments what another does;
- ``units``: in the cut trace, the second and third unit are alike relative to each other, with all metadata;
- ``outline``: a *thin* model, whose layers are placeholders of themselves, is traced with all its layers; stamping the
  cut thin model gives that very graph, so the code around layers treats every one alike, forward and backward;
- ``driver``: the step changed no Python state, so no call depends on how many came before it.

``runs`` finds and cuts, ``copying`` stamps, ``verdict`` compares graphs. What cannot be proven is ``Refused``.
"""
