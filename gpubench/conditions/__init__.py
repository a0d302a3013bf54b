"""Everything that can be wrong, and how it is found: pure functions of facts, logs and figures."""
