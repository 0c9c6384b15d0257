"""Runs on many hosts: who they are, whether they are fit, and how the host agents get there and begin."""
