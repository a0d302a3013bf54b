"""Backends that move data: NCCL, PyTorch, MPI and the host, with the copies and clocks that they share."""
