"""The output formats, one module per format."""
