"""The collectives that gpubench measures, one per module, and their expected times."""
