"""Measurements side by side in one run: one bench, one module; started by ``scripts/bench``."""
