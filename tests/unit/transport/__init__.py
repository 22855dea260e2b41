"""Tests of ``asyncddp.transport`` that need one process."""
