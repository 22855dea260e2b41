"""Weighted sums of tensors: weights, and implementations for CPU, devices and Triton."""
