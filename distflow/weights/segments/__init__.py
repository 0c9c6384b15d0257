"""Versions in the shared memory of a host: written by one process, mapped by the others."""
