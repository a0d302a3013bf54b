"""What the links of this node carry, and for whom: counters of GPUs and NICs, and the processes that use the GPUs."""
