"""Training steps of PyTorch for `benchmarks.plan_steps`: models, their times, and how they are laid over GPUs."""
