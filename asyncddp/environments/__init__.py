"""Environment variables by which launchers tell processes their rank, and ranks their children.

One class per launcher declares its variables. Any room may ask. No other file knows the names of
a launcher's variables, and none but these and :mod:`asyncddp.config` reads ``os.environ``.
"""
