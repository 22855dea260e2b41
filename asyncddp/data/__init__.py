"""Data of several ranks: how the samples of one data set are shared out among them."""

from asyncddp.data import partition

__all__ = ["partition"]
