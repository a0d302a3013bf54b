"""Judges machines by every check, from their facts and measurements."""
