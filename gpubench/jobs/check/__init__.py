"""Check machines: this one, those of a job, simulated ones, or a recording."""
