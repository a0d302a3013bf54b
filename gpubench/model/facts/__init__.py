"""Facts of nodes, processes and devices as they were read, before any arithmetic."""
