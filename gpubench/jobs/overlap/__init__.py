"""The command overlap: a collective beside computation, on ranks or on a simulated machine."""
