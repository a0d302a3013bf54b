"""What is told of a watch: the frame of one interval, and the sentence of all of it."""
