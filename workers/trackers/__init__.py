"""Trackers by other projects' libraries: each imports its own only when it is made, in a process of its own."""
