"""The training job of a plan: the model, how it is laid over GPUs, and what that needs of memory."""
