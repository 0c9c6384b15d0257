"""Runs one worker's script: step registry, context, engines and backends by protocol, metrics, checkpoints, waits."""
