"""Batches of samples, their wire format, packing into micro-batches, randomness, and prompt sources."""
