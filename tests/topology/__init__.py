"""Graphs, schedules and their analysis, against closed forms and golden values."""
