"""Tensors: the dtype table, creation, byte views and flat buckets of many tensors."""
