"""Tests of ``asyncddp.context`` that need one process."""
