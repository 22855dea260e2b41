"""Tracing of what each rank did when: recording, merging and reporting of Chrome traces.

A rank's :class:`~asyncddp.timeline.tracer.Tracer` records events, and a thread of its own writes
them to the rank's file while the run goes on. Nothing in here knows a verb, a transport or a model:
the packages above record the events. Reading files, merging and reporting need no torch.
"""
