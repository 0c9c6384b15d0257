"""Scripts of other systems: run by a Python that has those, never imported by distflow."""
