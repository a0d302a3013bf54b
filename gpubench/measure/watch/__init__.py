"""Watch the traffic of running jobs, and name the path that their data take."""
