"""Tests of ``asyncddp.windows`` that need one process."""
