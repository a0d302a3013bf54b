"""Machines that do not exist: their nodes, what is broken in them, and how long collectives would take."""
