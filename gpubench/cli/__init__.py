"""The command line: options, launch, presentation, exit code."""
