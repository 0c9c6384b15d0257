"""The run folder: what lies in it, what `run.json` says, how a run ended, and from what it goes on."""
