"""The job as MPI sees it, and the host backend, which moves NumPy buffers over it."""
