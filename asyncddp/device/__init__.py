"""Device streams and events behind one interface, with implementations for CUDA and the host.

Here belongs the ordering of work on a device: streams, events, pinned memory. ``engine``,
``kernels`` and ``transport`` call it; each kind of device has one implementation. The host never
waits for a device here unless a caller asks for it.
"""
