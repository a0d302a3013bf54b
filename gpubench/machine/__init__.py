"""Reads a node: NVML, the CUDA driver, sysfs, /proc, and machines recorded on disk."""
