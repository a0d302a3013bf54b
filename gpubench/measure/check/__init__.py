"""Judge machines with every check, from their facts and measurements."""
