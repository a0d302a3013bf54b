"""Reads NCCL's debug log of any job."""
