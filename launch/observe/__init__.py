"""Reads a run, whether it goes on or has ended: how it stands, where its time goes, what it wrote. Starts nothing."""
