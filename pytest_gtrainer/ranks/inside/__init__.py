"""The code inside a rank: a small pytest session on a warm process group."""
