"""Timeline tracing: records what each rank does when, merges and reports Chrome traces.

Here belong the recorder, the merge of ranks' clocks, and reports. The rooms above record events;
nothing in here knows an operation, a transport or a model. Reading files, merging and reporting
need no torch.
"""
