class AutoParallel:
    """A base class without anything to inherit."""
