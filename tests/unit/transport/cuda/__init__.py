"""Tests of ``asyncddp.transport.cuda`` that need one process."""
