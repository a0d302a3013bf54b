"""The wiring of devices, the choices of a library between them, and the evidence for each path."""
