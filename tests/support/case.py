"""Cases, of which tests here want more than is public."""

from asyncddp.testing.rank_function_call import (
    DEFAULT_SETTINGS,
    RankFunctionCall,
    capture_outcome,
    run_case,
)

__all__ = ["DEFAULT_SETTINGS", "RankFunctionCall", "capture_outcome", "run_case"]
