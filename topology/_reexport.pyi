"""The short name in a wheel, for type checkers: the names of `asyncddp.topology`."""

from asyncddp.topology import *
