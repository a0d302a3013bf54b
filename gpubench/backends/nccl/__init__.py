"""The nccl backend, its communicators, and NCCL's log."""
