"""Strategies that are measured, by the names of their rows."""

from __future__ import annotations

__all__ = ["ASYNCHRONOUS", "DDP", "STRATEGIES"]

DDP = "Lightning's ddp, gloo"
ASYNCHRONOUS = ("win_put", "push_sum", "async_model_average")
STRATEGIES = {
    DDP: "",
    "gradient_allreduce": "gradient_allreduce",
    "adapt_then_combine, one-peer": "adapt_then_combine",
    **{name: name for name in ASYNCHRONOUS},
}
"""``{row: algorithm}``"""
