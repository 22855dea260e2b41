"""Tests of ``asyncddp.compression`` that need one process."""
