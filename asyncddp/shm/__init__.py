"""Shared memory between the processes of one machine: allocation, ring buffers, collectives.

Here belongs memory that several processes map, and the words with which they synchronise.
``transport``, ``engine`` and ``windows`` use it. A word is written by one rank alone and only
grows; data that a reader has not acknowledged is never overwritten.
"""
