"""What this process may do and what it has loaded."""
