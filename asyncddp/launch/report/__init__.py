"""What a monitored run has left, read again: without MPI and torch."""
