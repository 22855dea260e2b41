"""Tests of ``asyncddp.integrations`` that need one process."""
