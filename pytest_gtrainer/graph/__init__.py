"""What a node of a graph is: collective, wait, group, direction, module, effect; and how buckets lie in payloads."""
