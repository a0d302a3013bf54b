"""Start ranks on one host or several, exchange messages with them, and detect hangs."""
