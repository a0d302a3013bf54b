"""A collective beside computation: what each costs the other, and the cap that makes the shortest step."""
