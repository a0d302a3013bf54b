"""Report on the libraries that move data between GPUs."""
