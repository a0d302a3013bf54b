"""The process beside each rank that sees when nothing moves any more."""
