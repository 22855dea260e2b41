"""Merging of the ranks' trace files into one trace on rank 0's clock."""
