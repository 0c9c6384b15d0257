"""Command line, host agent, fork server, and the readers of run folders. Nothing in here trains or generates."""
