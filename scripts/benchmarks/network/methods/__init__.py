"""Benchmark ``network-methods``: methods and compressors over slow and long links."""
