"""What launchers say in the environment of the processes that they start, and what ranks pass on.

One class per launcher declares its variables. Any package may ask. No other file knows the names of
a launcher's variables, and none but these and :mod:`asyncddp.config` reads ``os.environ``.
"""
