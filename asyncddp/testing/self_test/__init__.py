"""Self-test of an installation: calls every operation once on all ranks, and checks its result.

``asyncddp doctor --check`` starts ``python -m asyncddp.testing.self_test`` on two ranks for each
transport and reports which of them work.
"""

from asyncddp.testing.self_test.verb_checks import CHECKS, SelfTestData, problems

__all__ = ["CHECKS", "SelfTestData", "problems"]
