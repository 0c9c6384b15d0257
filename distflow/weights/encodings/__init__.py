"""How the bytes of a version get fewer: only what has changed, or rounded."""
