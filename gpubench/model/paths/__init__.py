"""How devices are wired, which paths communication libraries choose, and the evidence for each path."""
