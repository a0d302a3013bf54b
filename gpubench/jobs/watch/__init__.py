"""`gpubench watch`: a source of readings, the loop, and what is shown of it."""
