"""Measure a collective: here by launching ranks, as one rank of a job, simulated, or replayed."""
