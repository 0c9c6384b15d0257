"""Pure tensor math of policy optimisation: advantages, losses, corrections, divergences, aggregation."""
