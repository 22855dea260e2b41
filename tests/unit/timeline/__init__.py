"""Tests of ``asyncddp.timeline`` that need one process."""
