"""NCCL transport: collectives and point-to-point messages between GPUs, through cupy."""
