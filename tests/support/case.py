"""Cases, of which tests here want more than is public."""

from asyncddp.testing.distributed_case import (
    DEFAULT_SETTINGS,
    DistributedTestCase,
    capture_outcome,
    run_case,
)

__all__ = ["DEFAULT_SETTINGS", "DistributedTestCase", "capture_outcome", "run_case"]
