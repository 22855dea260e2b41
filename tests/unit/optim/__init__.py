"""Tests of ``asyncddp.optim`` that need one process."""
