"""Start ranks on one host or several, and watch over them."""
