"""Starting and supervising MPI ranks with ``mpirun`` or ``srun``, without loading MPI or torch.

``asyncddp run`` describes the run in a :class:`~asyncddp.launch.job.Job`; a launcher of
:mod:`asyncddp.launch.launchers` turns that into a command line, :mod:`asyncddp.launch.supervisor`
runs it, and :mod:`asyncddp.launch.diagnosis` explains a failed run in one sentence.
"""
