"""One node as the kernel, NVML and CUDA describe it."""
