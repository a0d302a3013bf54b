"""Simulate machines: their nodes, their faults, and the times of copies and collectives on them."""
