"""Both sides of a training run in a simulated world: eager on threads, the graph in the interpreter."""
