"""Two sets of results, row by row."""
