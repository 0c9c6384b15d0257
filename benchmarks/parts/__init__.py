"""Processes, contestants and clocks that benchmarks are made of; nothing here is a benchmark."""
