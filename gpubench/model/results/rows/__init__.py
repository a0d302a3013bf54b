"""The row types of report sections, one module a command or a subject."""
