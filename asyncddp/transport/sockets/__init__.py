"""Socket transport between ranks started by a torch.distributed launcher; it needs no MPI."""
