"""Streams and events of devices, and of the host, behind one interface.

Here belongs the order of work on a device: streams, events, pinned memory. ``engine``, ``kernels``
and ``transport`` call it, one implementation for each kind of device. The host never waits for a
device here unless a caller asks for it.
"""
