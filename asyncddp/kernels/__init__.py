"""Weighted sums of tensors: averaging weights, and implementations for CPU, devices and Triton.

Here belongs the arithmetic of averages, once. ``engine``, ``ops`` and ``windows`` call it. All
implementations accumulate in the same dtype and order, so that they give the same results.
"""
