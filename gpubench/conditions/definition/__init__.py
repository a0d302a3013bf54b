"""The parts of a condition: the run that it looks at, its sightings, and what a log says."""
