"""A scan on real nodes: rank 0 sends orders, a supervisor on every rank executes them, and worker processes measure."""
