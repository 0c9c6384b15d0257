"""Command line, host agent, nursery, and the readers of run folders. Nothing in here trains or generates."""
