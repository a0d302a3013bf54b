"""Conditions that end a job: NCCL says them in its log, no fact of a machine shows them."""
