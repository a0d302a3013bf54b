"""The wiring of devices, the paths that a library chooses, and the evidence for each path."""
