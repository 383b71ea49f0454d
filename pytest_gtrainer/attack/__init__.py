"""Attack a pass: reduce a graph on which it fails to a small one."""
