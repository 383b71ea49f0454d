"""Which pass, and which node of its graph, is the first whose value differs; in any world that moves data."""
