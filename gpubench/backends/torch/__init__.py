"""The torch backends: torch.distributed of the user's environment."""
