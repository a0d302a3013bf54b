"""What the html format is made of: the look, curves as SVG."""
