"""One job per command: it turns a plan and a source of machines into a report. Only jobs connect measurements with
hardware.
"""
