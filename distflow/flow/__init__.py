"""Recipe to graph to plan to script: what each worker will do, computed by each worker itself. Never imports torch."""
