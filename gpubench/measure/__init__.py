"""Use cases of the commands. They use ports and the model, print nothing and import no library."""
