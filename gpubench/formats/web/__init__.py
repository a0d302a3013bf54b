"""The parts of the html format: the page, its look, curves as SVG."""
