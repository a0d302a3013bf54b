"""Watches the traffic of running jobs and names the path that their bytes take."""
