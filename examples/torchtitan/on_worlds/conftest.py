"""On ranks, too, FlexAttention has its dense formula."""

from means import means

__all__ = ["means"]
