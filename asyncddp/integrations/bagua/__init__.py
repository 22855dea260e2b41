"""Bagua's names on asyncddp."""
