"""Reads the text and JSON output of nccl-tests."""
