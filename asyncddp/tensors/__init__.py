"""Local helpers for tensors: dtype table, allocation, byte views, flat buckets, free list, means.

Here belong functions of tensors that involve no other rank. Every package above calls them. The
dtype table is the only one in the library.
"""
