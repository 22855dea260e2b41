"""Start and supervision of MPI ranks by ``mpirun`` or ``srun``, without loading MPI or torch.

Here belong launchers (one class each), signals, output, and the diagnosis of how a run ended.
``cli``, notebooks and ``baguarun`` call it. Nothing that a run has started outlives it, and its
exit code is that of the first rank that failed; in an elastic run the other ranks go on.
"""
