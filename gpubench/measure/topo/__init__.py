"""The report on machines, and the fallbacks to expect on them."""
