"""Start a run on one host or many (checks, placement, run folders, agents), watch it, and stop it."""
