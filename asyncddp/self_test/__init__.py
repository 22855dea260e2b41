"""Every verb once on the ranks that have been started, against what it must give.

``asyncddp doctor --check`` starts ``python -m asyncddp.self_test`` on two ranks for each wire and
says which of them work.
"""

from asyncddp.self_test.checks import CHECKS, Case, problems

__all__ = ["CHECKS", "Case", "problems"]
