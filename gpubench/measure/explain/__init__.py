"""A job explained from NCCL's log."""
