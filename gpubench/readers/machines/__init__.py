"""Reads files that describe one machine: NCCL topology XML, `nvidia-smi topo -m`, recorded snapshots."""
