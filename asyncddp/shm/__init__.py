"""Shared memory between the processes of one machine: arena, buddy allocator and rings."""
