"""Ranks on hosts of their own, which are network namespaces."""
