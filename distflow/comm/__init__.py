"""One ZeroMQ endpoint per worker; peers connect to each other directly. Headers are msgpack, payloads raw bytes."""
