"""Pure tensor mathematics of policy optimisation: advantages, losses, corrections, divergences, aggregation."""
