"""The subcommands: help pages, checks of option values, and the job that each subcommand runs."""
