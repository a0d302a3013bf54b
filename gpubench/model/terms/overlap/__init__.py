"""Communication beside computation: what is asked for, and the arithmetic of its times."""
