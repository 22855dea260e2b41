"""Tests of ``asyncddp.membership``, without processes, sockets or clocks."""
