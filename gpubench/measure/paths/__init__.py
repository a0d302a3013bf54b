"""What is known of paths, and why they are as they are; shared by collectives and copies."""
