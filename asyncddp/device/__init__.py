"""Streams and events of devices, and of the host."""
