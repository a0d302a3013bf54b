"""Starting this program again as ranks, and hearing from them."""
