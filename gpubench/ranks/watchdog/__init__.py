"""The watchdog: a process next to each rank that ends a job without progress."""
