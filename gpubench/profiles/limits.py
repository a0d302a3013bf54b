"""The limits of what is read of profiles."""

MOST_BYTES = 2**18
"""Of a file: the largest of gpubench's own has 14 KB, and nested arrays take the square of their number to read."""

MOST_DEPTH = 16
"""Of tables and arrays in each other, and of the parts of a dotted key: a profile has three."""

MOST_FILES = 1000
"""Of a folder of a user's own, which is read by every command that looks for a profile."""
