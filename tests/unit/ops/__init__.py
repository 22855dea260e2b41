"""Tests of ``asyncddp.ops`` that need one process."""
