"""The commands: help, checks of option values, and the job that each calls."""
