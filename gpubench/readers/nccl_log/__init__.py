"""Reads NCCL's debug log from any job."""
