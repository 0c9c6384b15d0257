"""The run folder: its files, `run.json`, how a run ended, and which checkpoint it resumes from."""
