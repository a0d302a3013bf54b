"""Evidence of paths and its causes; shared by collectives and copies."""
