"""The collectives that gpubench measures, one value a module."""
