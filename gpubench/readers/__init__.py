"""Reads files of the field into the model: machines, logs, results."""
