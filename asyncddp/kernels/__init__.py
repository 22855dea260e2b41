"""Weighted sums of tensors: weights, and implementations for CPU, devices and Triton.

Here belongs the arithmetic of an average, once. ``engine``, ``ops`` and ``windows`` call it. All
implementations accumulate in the same dtype and order, so that a result is the same wherever it is
computed.
"""
