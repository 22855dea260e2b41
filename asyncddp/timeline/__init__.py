"""Tracing of what each rank did when: recording, merging and reporting of Chrome traces.

The packages above record the events; nothing in here knows an operation, a transport or a model.
Reading files, merging and reporting need no torch.
"""
