"""Collectives: launch their ranks, run as one of them, simulate, or replay a recording."""
