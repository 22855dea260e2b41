"""Cases, of which tests here want more than is public."""

from asyncddp.testing.case import DEFAULTS, Case, perform, recorded

__all__ = ["DEFAULTS", "Case", "perform", "recorded"]
