"""What machines are, and which fallbacks are to be expected on them."""
