"""One job a command: a plan and a source of machines in, a report out; the only place where measure meets hardware."""
