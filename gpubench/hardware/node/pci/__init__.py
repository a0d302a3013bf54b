"""The PCI tree of a node, from sysfs."""
