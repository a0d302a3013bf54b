"""What the html format is made of: the page, its look, curves as SVG."""
