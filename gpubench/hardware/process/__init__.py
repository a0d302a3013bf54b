"""This process: its rights, its limits, the libraries that it has loaded."""
