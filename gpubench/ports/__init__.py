"""The interface between measurements and hardware, as small Protocols by subject."""
