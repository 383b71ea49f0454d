"""Stands for a package that is on no index: tests that put their own class in its place import it."""
