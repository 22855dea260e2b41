"""Tests of ``asyncddp.kernels`` that need one process."""
