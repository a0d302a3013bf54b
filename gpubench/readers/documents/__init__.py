"""Text, XML and JSON lines, with errors that name the file and the place."""
