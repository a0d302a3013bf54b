"""Units, verdicts, operations, sampling: the words and small values that everything else is said in."""
