"""The command line: options, launcher, presentation and exit code."""
