"""Predicts training steps for `gpubench plan`: only cli/commands/plan.py imports this package."""
