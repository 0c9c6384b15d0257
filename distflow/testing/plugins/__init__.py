"""`distflow test-plugin`: contract suites for steps, functions and data sources of one's own, on synthetic batches."""
