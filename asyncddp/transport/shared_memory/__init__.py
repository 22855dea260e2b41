"""What ranks of one machine do through shared memory: forming groups, sums and copies."""
