"""Tests of ``asyncddp.tensors`` that need one process."""
