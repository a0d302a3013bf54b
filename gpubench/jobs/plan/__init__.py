"""Predict a training step: find curves, compute times and contention, then simulate."""
