"""Tests of ``asyncddp.monitoring`` that need one process."""
