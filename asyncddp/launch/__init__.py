"""Starting and supervising MPI ranks with ``mpirun`` or ``srun``, without loading MPI or torch."""
