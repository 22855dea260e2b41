"""Tensors: the dtype table, creation, byte views, flat buckets, and a free list of buffers.

Here belongs what is known of a tensor without other ranks. Every room above calls it. The dtype
table is the only one in the library.
"""
