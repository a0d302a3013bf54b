"""Starts ranks, on this host or several, and watches over them."""
