"""CUDA IPC transport: ranks read the GPU memory of other processes on their machine."""
