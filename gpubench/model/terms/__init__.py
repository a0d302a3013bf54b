"""Basic terms: units, verdicts, operations, ranks, settings, statistics."""
