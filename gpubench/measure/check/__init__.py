"""Every check on machines and on what was measured of them."""
