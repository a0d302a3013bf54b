"""Run collectives: launch their ranks, run as one rank, simulate, or replay a recording."""
