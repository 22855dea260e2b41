"""CUDA IPC transport: a rank reads the GPU memory of another process of its machine."""
