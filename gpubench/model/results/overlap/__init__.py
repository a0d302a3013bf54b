"""What `overlap` found, as curves and in a sentence."""
