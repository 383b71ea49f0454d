"""Chunking: run chosen regions of a joint graph in N parts, bit for bit as eager chunking.

Start at ``chunk``. A *root* is a module whose FQN matches the configuration. Its *region* is what
its forward, or backward, does, and the *body* what every chunk repeats. The *chunk dimension* of
the root's activation, of extent B, is cut into N *chunks*. A *live-in* is read by a body and made
outside of it, a *live-out* the other way round. *Twins* are graphs of the step at extents B and
B/N, node for node: what differs depends on the chunk dimension.
"""
