"""What a fabric makes of a training step: an event simulation of streams, from curves of time over size."""
