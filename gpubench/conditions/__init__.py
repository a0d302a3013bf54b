"""Everything that can be wrong with a machine or job. Detectors are pure functions of facts, logs and measurements."""
