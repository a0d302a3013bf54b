"""The sections of `gpubench topo`."""
