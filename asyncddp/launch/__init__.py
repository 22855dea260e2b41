"""Starting and supervising MPI ranks with ``mpirun`` or ``srun``, without loading MPI or torch.

:mod:`.launchers` turn a :class:`.job.Job` into a command line, :mod:`.supervisor` runs it, and
:mod:`.diagnosis` explains a failed run in one sentence.
"""
