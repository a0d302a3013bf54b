"""Compare two sets of results row by row."""
