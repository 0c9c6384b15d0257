"""Weights across hosts: chunks of a version from whoever holds them, each checked by its digest."""
