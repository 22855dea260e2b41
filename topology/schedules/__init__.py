"""Schedules of time-varying graphs, one file per family; functions are registered by name."""
