"""The traffic of jobs that run already: readings in, the way that their bytes take out."""
