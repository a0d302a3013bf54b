"""How devices are wired, what a library chose between them, and what is known of each path."""
