"""Shared memory between ranks of one machine: forming groups, sums and copies."""
