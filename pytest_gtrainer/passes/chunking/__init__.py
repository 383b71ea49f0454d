"""Chunking: run chosen regions of a joint graph in N parts, equal bit for bit to eager chunking.

Terms, used in all modules:

- a *root* is a module whose FQN matches the configuration; its *region* in one direction is what
  the root's forward, or backward, does;
- the *chunk dimension* is the dimension of the root's activation that is cut, of extent B; a *chunk*
  is one of N equal parts;
- the *body* of a region is what every chunk repeats; everything else of the root is shared;
- a *live-in* is read by a body and made outside of it, a *live-out* the other way round;
- *twins* are two graphs of the same step, the full one at extent B and the part at B/N, node for
  node. What differs between them depends on the chunk dimension.

``config`` says what is chunked, ``twins`` makes and aligns them, ``regions`` finds bodies, ``schedule`` orders,
``rewrite`` makes the new graph, ``chunk`` is the pass, with what it refuses: start there.
"""
