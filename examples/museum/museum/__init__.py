"""The frame of the museum: what an exhibit says of itself, usual practice, and the table."""

from museum.exhibit import EXHIBITS, KINDS, Exhibit, exhibit

__all__ = ["EXHIBITS", "KINDS", "Exhibit", "exhibit"]
