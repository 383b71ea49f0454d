"""The private names of torch: a module a topic, and nowhere else in this package."""
