"""The same work done by other systems, and by a loop with nothing around it."""
