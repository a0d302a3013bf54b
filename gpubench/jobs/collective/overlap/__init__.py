"""One rank of a collective beside computation."""
