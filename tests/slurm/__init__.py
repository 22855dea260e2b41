"""Ranks under a real Slurm, with both its daemons on this machine."""
