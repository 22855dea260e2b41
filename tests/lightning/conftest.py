"""Ranks that have Lightning imported already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.worlds import World, open_transport


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks to run cases on, which other tests do not use."""
    with open_transport(request.param, frameworks=True) as opened:
        yield opened
