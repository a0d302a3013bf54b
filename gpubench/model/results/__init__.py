"""The rows of every report, and pure functions that derive verdicts, findings and sentences from rows."""
