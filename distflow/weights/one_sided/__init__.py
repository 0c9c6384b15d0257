"""Reads of a version in its publisher's memory, by other hosts and with NIXL (`weights.link: nixl`)."""
