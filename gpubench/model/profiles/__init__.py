"""Profiles of healthy machines, comparison of measurements with them, and faults of simulated machines."""
