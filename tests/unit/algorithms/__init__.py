"""Tests of ``asyncddp.algorithms`` that need one process."""
