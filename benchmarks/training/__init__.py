"""Training steps of PyTorch for `benchmarks.plan_steps`: models, timing, and distribution over GPUs."""
