"""Shared memory between the processes of one machine: arena, buddy allocator and rings.

Here belongs memory that several processes map, and the words by which they hand it over.
``transport``, ``engine`` and ``windows`` use it. A word is written by one rank alone and only
grows; what a reader has not acknowledged is never written over.
"""
