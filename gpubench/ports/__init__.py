"""The hardware seam: what a measurement needs from a machine, small Protocols by subject."""
