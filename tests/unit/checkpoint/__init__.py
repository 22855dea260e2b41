"""Tests of ``asyncddp.checkpoint`` that need one process."""
