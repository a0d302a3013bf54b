"""torch.distributed in the user's own environment, as a backend of collectives."""
