"""One module a command: options in, job called, exit code out."""
