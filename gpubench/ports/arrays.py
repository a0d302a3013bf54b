"""Arrays of NumPy and CuPy alike."""

from typing import Any

Array = Any
"""A NumPy or CuPy array."""


ArrayNamespace = Any
"""The module of an array: `numpy` or `cupy`."""
