#!/bin/bash
# One rank for each GPU of two nodes:  sbatch examples/slurm/gpu.sh train.py --epochs 90
#
# Every rank sees all GPUs of its node and takes that of its local_rank(), which leaves each wire
# between them possible. The self-test costs a minute and shows which wire works here.
#SBATCH --job-name=asyncddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

# shellcheck disable=SC1091 # the environment is made by whoever runs this
source "${VENV:-.venv}/bin/activate"
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export ASYNCDDP_TIMEOUT=300
export ASYNCDDP_DEVICE_TRANSPORTS=${ASYNCDDP_DEVICE_TRANSPORTS:-nccl,mpi_cuda}

asyncddp doctor --check -np "$SLURM_NTASKS"
asyncddp run "${@:?usage: sbatch examples/slurm/gpu.sh train.py}"
