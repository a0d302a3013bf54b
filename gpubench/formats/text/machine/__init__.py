"""Parts of pages for people about a machine: devices, the PCI tree, what would fall back and why, paths seen."""
