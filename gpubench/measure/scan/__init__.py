"""Find the faulty parts among thousands of nodes by comparing pairs of nodes."""
