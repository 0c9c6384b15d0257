"""Weights by version: `publish` on the training side, `refresh` on the generating side, over links (`transport`)."""
