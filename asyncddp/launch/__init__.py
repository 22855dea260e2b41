"""The command line: starts ranks with the MPI launcher that is there; imports no MPI, no torch.

``asyncddp run`` describes what is wanted in a :class:`~asyncddp.launch.job.Job`, one of
:mod:`asyncddp.launch.vendors` turns it into a command, :mod:`asyncddp.launch.supervise` runs that
command and :mod:`asyncddp.launch.verdict` says in one sentence why it failed, where it did.
"""
