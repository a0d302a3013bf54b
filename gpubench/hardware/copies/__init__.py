"""Copies between GPUs of one process, and between GPUs of two."""
