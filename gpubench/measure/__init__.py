"""Use cases: they know the ports and the model, print nothing and import no library."""
