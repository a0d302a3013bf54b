"""Predicts training steps for `gpubench plan`. Only cli/commands/plan.py imports this package."""
