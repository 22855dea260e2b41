"""Transport between ranks that a launcher of torch.distributed has started; needs no MPI."""
