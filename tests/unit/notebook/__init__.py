"""Tests of ``asyncddp.notebook`` that need one process."""
