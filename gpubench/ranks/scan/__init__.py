"""A scan on real nodes: rank 0 directs, a supervisor on every rank obeys, and its worker processes measure."""
