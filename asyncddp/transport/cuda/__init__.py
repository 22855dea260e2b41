"""Transports for CUDA tensors (staged, CUDA-aware MPI, NCCL, CUDA IPC), and their selection."""
