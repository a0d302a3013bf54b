"""The MPI job, and the backends that move data over MPI."""
