"""Tests of ``asyncddp.cli`` that need one process."""
