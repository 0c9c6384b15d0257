"""From a recipe to a run that goes on, on one host or many: checks, placement, run folders, agents; and its stop."""
