"""Find faulty components among thousands of nodes by measuring pairs of nodes."""
