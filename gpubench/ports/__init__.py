"""The hardware seam: what a measurement needs from a machine, one Protocol a module."""
