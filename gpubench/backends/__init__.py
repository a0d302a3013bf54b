"""Backends that move data (NCCL, PyTorch, MPI and CPU buffers), and the copies and clocks that they share."""
