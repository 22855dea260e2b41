"""Benchmark ``gpu``: averages of tensors on a GPU over each transport."""
