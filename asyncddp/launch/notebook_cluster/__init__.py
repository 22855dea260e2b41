"""ipyparallel clusters for notebooks: a controller, and one engine per rank of an MPI run.

::

    daemon          one process that starts the others; when it ends, or its owner does, all end
    ├── controller      ipyparallel's, to which notebooks and engines connect
    └── asyncddp run    our launcher, and under it one engine for each rank

The processes of an ``ipyparallel.Cluster`` would outlive an owner that is killed.
"""
