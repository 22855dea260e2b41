"""Tests of ``asyncddp.parallel`` that need one process."""
