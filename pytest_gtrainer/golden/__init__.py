"""Goldens: one file, one writer, reviewed by people."""
