"""Device streams, events and pinned host memory, for CUDA and for a simulation on the CPU."""
