"""Weights in parts: from every trainer of a divided model straight to the engines (`weights.link: collective`)."""
