"""What was read of nodes, processes and devices, before any arithmetic."""
