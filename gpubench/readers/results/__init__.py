"""Reads result files: gpubench's own, and those of nccl-tests, rccl-tests, nvbandwidth, OSU and others."""
