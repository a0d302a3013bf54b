"""What a healthy machine looks like, what is expected of it, and faults of simulated ones."""
