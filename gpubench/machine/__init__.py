"""Read a node's hardware and software state from NVML, the CUDA driver, sysfs, /proc, or a recording on disk."""
