"""Scan the nodes of a job, or simulated ones, for the part that is bad."""
