"""Threads that the library starts and that meet a device later, such as the progress thread."""

from __future__ import annotations

import threading

from asyncddp.device.streams import DeviceStreams

_this_thread = threading.local()


def mark_library_thread() -> None:
    """Mark this thread as one of the library's, bound to the first device that it uses."""
    _this_thread.unbound = True


def bind_library_thread(streams: DeviceStreams) -> None:
    """Bind this thread to a device on first use, if it is the library's; never a user's thread."""
    if getattr(_this_thread, "unbound", False):
        _this_thread.unbound = False
        streams.bind_thread()
