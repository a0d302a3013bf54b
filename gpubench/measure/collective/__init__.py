"""Measure one collective over a range of message sizes, and judge its speed and the paths that it used."""
