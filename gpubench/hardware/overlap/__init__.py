"""Computation beside a collective on a GPU: partners, and steps of both on two streams."""
