"""Device streams, events and pinned host memory."""
