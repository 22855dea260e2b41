"""What launchers really print, recorded from the programs named; unchanged but for host names."""

OPEN_MPI_4_VERSION = """\
mpirun (Open MPI) 4.1.4

Report bugs to http://www.open-mpi.org/community/help/
"""

OPEN_MPI_4_DEBIAN_VERSION = """\
mpirun.openmpi (OpenRTE) 4.1.4

Report bugs to http://www.open-mpi.org/community/help/
"""

OPEN_MPI_5_VERSION = """\
mpirun (Open MPI) 5.0.11

Report bugs to https://www.open-mpi.org/community/help/
"""

MPICH_4_VERSION = """\
HYDRA build details:
    Version:                                 4.3.1
    Release Date:                            Fri Jun 20 09:24:41 AM CDT 2025
    CC:                              x86_64-conda-linux-gnu-cc
    Configure options:                       '--disable-option-checking' '--with-device=ch4'
"""

MPICH_5_VERSION = """\
HYDRA build details:
    Version:                                 5.0.2
    Release Date:                            Fri Sep 25 20:45:26 UTC 2026
    CC:                              cc
    Configure options:                       --with-device=ch4:ucx,ofi --with-pm=hydra:gforker
    Process Manager:                         pmi
    Launchers available:                     ssh rsh fork slurm ll lsf sge manual persist
    Topology libraries available:            hwloc
    Resource management kernels available:   user slurm ll lsf sge pbs cobalt
    Demux engines available:                 poll select
"""

INTEL_MPI_2021_VERSION = """\
Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)
Copyright 2003-2026, Intel Corporation.
"""

INTEL_MPI_2019_VERSION = """\
Intel(R) MPI Library for Linux* OS, Version 2019 Update 7 Build 20200312 (id: 5dc2dd3e9)
Copyright 2003-2020, Intel Corporation.
"""

SRUN_DEBIAN_VERSION = "slurm-wlm 22.05.8\n"
SRUN_VERSION = "slurm 23.02.6\n"

OPEN_MPI_5_KILLED = """\
--------------------------------------------------------------------------
prterun noticed that process rank 2 with PID 3907 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""

OPEN_MPI_5_EXIT = """\
--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-3924@1,2]
   Exit code:    3
--------------------------------------------------------------------------
"""

OPEN_MPI_5_ABORT = """\
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD
  Proc: [[23478,1],2]
  Errorcode: 3

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
--------------------------------------------------------------------------
--------------------------------------------------------------------------
prterun has exited due to process rank 2 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
--------------------------------------------------------------------------
"""

OPEN_MPI_5_CONNECTION_CLOSED = """\
--------------------------------------------------------------------------
prterun has exited due to process rank 0 with PID 0 on node h1 calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
--------------------------------------------------------------------------
"""

OPEN_MPI_5_UNFINISHED = """\
--------------------------------------------------------------------------
prterun has exited due to process rank 1 with PID 9452 on node vm exiting
improperly. There are three reasons this could occur:

1. this process did not call "init" before exiting, but others in the
job did. This can cause a job to hang indefinitely while it waits for
all processes to call "init". By rule, if one process calls "init",
then ALL processes must call "init" prior to termination.

2. this process called "init", but exited without calling "finalize".
By rule, all processes that call "init" MUST call "finalize" prior to
exiting or it will be considered an "abnormal termination"

3. this process called "MPI_Abort" or "prte_abort" and the mca
parameter prte_create_session_dirs is set to false. In this case, the
run-time cannot detect that the abort call was an abnormal
termination. Hence, the only error message you will receive is this
one.

This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).

You can avoid this message by specifying -quiet on the prterun command
line.
--------------------------------------------------------------------------
"""

OPEN_MPI_5_HOST_SILENT = """\
--------------------------------------------------------------------------
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-h1-9481@0,0] on node h1
  Remote daemon: [prterun-h1-9481@0,1] on node h2

This is usually due to either a failure of the TCP network
connection to the node, or possibly an internal failure of
the daemon itself. We cannot recover from this failure, and
therefore will terminate the job.
--------------------------------------------------------------------------
"""

OPEN_MPI_5_HOST_LOST = """\
------------------------------------------------------------
A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the
daemon executable, or the executable was unable to find its
required supporting libraries. In some cases, the daemon was
able to execute, but was unable to complete a TCP connection
back to prterun:

  Local host:    h1
  Remote host:   h2
  Daemon exit status: 0

This may also be caused by a firewall on the remote host. Please
check that any firewall (e.g., iptables) has been disabled and
try again.
------------------------------------------------------------
"""

OPEN_MPI_4_KILLED = """\
--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
--------------------------------------------------------------------------
mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 11 (Segmentation fault).
--------------------------------------------------------------------------
"""

OPEN_MPI_4_EXIT = """\
--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[31165,1],2]
  Exit code:    3
--------------------------------------------------------------------------
"""

OPEN_MPI_5_NO_SLOTS = """\
--------------------------------------------------------------------------
There are not enough slots available in the system to satisfy the 3
slots that were requested by the application:

  hostname

Either request fewer procs for your application, or make more slots
available for use.
--------------------------------------------------------------------------
"""

MPICH_KILLED = """\

===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4739 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""

HYDRA_ABORT = """\
Abort(5) on node 2 (rank 2 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 5) - process 2
"""

INTEL_KILLED_ALONE = """\

===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 2 PID 4972 RUNNING AT vm
=   KILLED BY SIGNAL: 9 (Killed)
===================================================================================
"""


def _intel_block(rank: int, killed_by: str) -> str:
    return INTEL_KILLED_ALONE.replace("RANK 2 PID 4972", f"RANK {rank} PID {5118 + rank}").replace(
        "9 (Killed)", killed_by
    )


INTEL_KILLED_ALL = "".join(_intel_block(rank, "9 (Killed)") for rank in range(4))
INTEL_CRASHED = "".join(
    _intel_block(rank, "11 (Segmentation fault)" if rank == 2 else "9 (Killed)")
    for rank in range(4)
)

SRUN_EXIT = "srun: error: node7: task 2: Exited with exit code 3\n"
SRUN_KILLED = """\
srun: error: node7: task 2: Killed
srun: Terminating StepId=4711.0
slurmstepd: error: *** STEP 4711.0 ON node7 CANCELLED AT 2026-11-20T18:00:00 ***
srun: error: node8: tasks 3-4: Terminated
"""
SRUN_CRASHED = "srun: error: node7: task 2: Segmentation fault (core dumped)\n"
