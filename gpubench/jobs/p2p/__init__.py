"""Measure copies between GPUs: of this process, between ranks, simulated, or replayed."""
