"""Files of results: gpubench's own, and those of nccl-tests, rccl-tests and OSU."""
