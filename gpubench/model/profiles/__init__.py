"""Healthy machines, the figures expected of them, and faults of simulated ones."""
