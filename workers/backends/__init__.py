"""Training backends: each holds one model and its optimizer, and passes `distflow.testing.backend_contract`."""
