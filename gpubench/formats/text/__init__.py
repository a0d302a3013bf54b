"""Views that print the table for people, one module per command."""
