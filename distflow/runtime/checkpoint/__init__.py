"""Checkpoints: when they are written, by whom, in which files; which of them count, and which are kept."""
