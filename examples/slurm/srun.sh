#!/bin/bash
# The ranks as tasks of srun, as many sites want it:  sbatch examples/slurm/srun.sh train.py
#
# MPI says which way srun and the MPI library meet: pmix for Open MPI 5, pmi2 or the site's own for
# others (srun --mpi=list). --cpus-per-task is repeated because srun has not read the job's since
# Slurm 22.05.
#SBATCH --job-name=asyncddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

# shellcheck disable=SC1091 # the environment is made by whoever runs this
source "${VENV:-.venv}/bin/activate"
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export ASYNCDDP_TIMEOUT=300

srun --mpi="${MPI:-pmix}" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 \
    python "${@:?usage: sbatch examples/slurm/srun.sh train.py}"
