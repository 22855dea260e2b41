"""The timeline: who did what when, as each rank writes it down and as people read it.

A rank's :class:`~asyncddp.timeline.recorder.Recorder` takes notes, a thread of its own writes them
to the rank's file while the run goes on. Nothing in here knows a verb, a wire or a model: the rooms
above take the notes. Reading files, merging and reporting need no torch.
"""
