"""Tests of ``asyncddp.engine`` that need one process."""
