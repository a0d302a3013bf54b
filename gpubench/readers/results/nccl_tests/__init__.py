"""The text and the JSON of nccl-tests."""
