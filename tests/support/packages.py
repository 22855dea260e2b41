"""Packages that a test needs."""

from __future__ import annotations

import importlib.util

import pytest

__all__ = ["need"]


def need(*packages: str) -> None:
    """Skip a module whose packages are not installed, without importing them.

    Every worker collects every module, and some packages take seconds to import.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed", allow_module_level=True)
