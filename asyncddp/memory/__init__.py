"""Tensors as bytes: the one dtype table, views of storage, flat buckets."""
