"""One GPU through CuPy."""
