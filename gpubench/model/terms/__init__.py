"""Basic terms that all other modules use: units, verdicts, operations, ranks, settings, statistics."""
