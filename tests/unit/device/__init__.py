"""Tests of ``asyncddp.device`` that need one process."""
