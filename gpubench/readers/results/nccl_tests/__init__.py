"""Reads the text and the JSON of nccl-tests."""
