"""What the links between GPUs should deliver, what they deliver, and why not."""

__version__ = "0.1.0"
