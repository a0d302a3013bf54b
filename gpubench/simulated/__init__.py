"""Simulates machines: their nodes, faults, and the times of copies and collectives."""
