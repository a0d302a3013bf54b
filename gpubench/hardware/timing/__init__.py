"""Timed loops, in Python and in native code."""
