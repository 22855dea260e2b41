"""Wrappers that train a model on all ranks."""
