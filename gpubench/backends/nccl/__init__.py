"""The nccl backend, and NCCL's log and status service."""
