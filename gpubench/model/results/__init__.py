"""Reports, their rows, and what is derived from rows."""
