"""Facts about nodes, processes and devices as they were read, before any calculation."""
