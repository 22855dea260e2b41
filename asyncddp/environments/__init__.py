"""Environment variables set by launchers for their ranks, and by ranks for their child processes.

One class per launcher declares its variables. Any room may ask. No other file knows the names of
a launcher's variables, and none but these and :mod:`asyncddp.config` reads ``os.environ``.
"""
