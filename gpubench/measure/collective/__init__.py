"""Measure one collective over a sweep of sizes, and judge the paths of its bytes."""
