"""Tensors: the dtype table, creation, byte views, flat buckets, and a free list of buffers."""
