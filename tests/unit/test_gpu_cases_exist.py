"""The cases that run on GPUs, which this machine may not have, are there."""

import importlib

from tests.gpu import conformance


def test_each_case_names_a_function():
    """A test that is renamed takes its case along."""
    missing = [
        str(case)
        for case in conformance.CASES
        if not hasattr(importlib.import_module(f"tests.conformance.test_{case.module}"), case.name)
    ]
    assert missing == []
