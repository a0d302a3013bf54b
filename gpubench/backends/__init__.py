"""Moves bytes between GPUs: NCCL, PyTorch, MPI and the host, and the copies and clocks they share."""
