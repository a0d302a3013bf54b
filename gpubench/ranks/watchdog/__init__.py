"""The watchdog: a process next to each rank that ends the job if no rank makes progress."""
