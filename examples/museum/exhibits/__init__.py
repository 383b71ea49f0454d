"""One bug a file: what happened, the smallest program that has it, and the check that finds it."""
