"""What NCCL's log says of a job."""
