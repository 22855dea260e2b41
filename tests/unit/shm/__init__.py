"""Tests of ``asyncddp.shm`` that need one process."""
