"""Tests of ``asyncddp.testing`` that need one process."""
