"""The fabric of a plan as the network files that other programs want: Calculon, ASTRA-sim, SimAI."""
