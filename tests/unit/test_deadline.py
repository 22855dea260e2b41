"""The deadline of a wait: one warning, then an error, in the same words everywhere."""

from __future__ import annotations

from asyncddp.config import Config
from asyncddp.deadline import Deadline
from asyncddp.errors import WaitTimeoutError


def test_it_warns_once_and_then_passes(caplog):
    """A wait warns once after ``warn_after`` and fails after ``timeout``, not at them."""
    deadline = Deadline(Config(timeout=10.0, warn_after=5.0))
    assert not deadline.warns(5.0)
    assert deadline.warns(6.0)
    deadline.warn("rank 0: put", 6.0, "missing: rank 1")
    assert not deadline.warns(7.0)
    assert caplog.messages == ["rank 0: put has been waiting for 6 s; missing: rank 1"]
    assert not deadline.has_passed(10.0)
    assert deadline.has_passed(11.0)
    error = deadline.error("rank 0: put", 11.0, "missing: rank 1")
    assert isinstance(error, WaitTimeoutError)
    assert str(error) == (
        "rank 0: put was not done in 11.0 s (ASYNCDDP_TIMEOUT=10); missing: rank 1"
    )


def test_a_warning_given_in_other_words_counts(caplog):
    """After ``mark_warned`` no warning is due any more, and none is logged."""
    deadline = Deadline(Config(timeout=10.0, warn_after=5.0))
    deadline.mark_warned()
    assert not deadline.warns(6.0)
    assert caplog.messages == []


def test_it_begins_when_it_is_made():
    """The time of a wait counts from when its Deadline was made."""
    assert 0.0 <= Deadline(Config()).waited() < 60.0
