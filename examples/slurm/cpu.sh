#!/bin/bash
# Trains on the cores of two nodes:  sbatch examples/slurm/cpu.sh train.py --epochs 90
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

asyncddp run "${@:?usage: sbatch examples/slurm/cpu.sh train.py}"
