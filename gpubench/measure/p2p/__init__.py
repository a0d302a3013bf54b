"""Measure copies between GPUs, and between GPUs and host memory."""
