"""Transport between ranks started by a torch.distributed launcher; needs no MPI."""
