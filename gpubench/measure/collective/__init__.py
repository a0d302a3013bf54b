"""Measure one collective over a sweep of sizes, and know which way its bytes go."""
