"""NVML: the driver, its GPUs, links and counters. `library` is the only importer of pynvml."""
