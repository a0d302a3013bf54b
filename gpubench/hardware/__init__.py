"""Adapters: each foreign library is imported in one file here, late, inside functions."""
