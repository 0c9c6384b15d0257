"""The test kit: in-memory network, fakes, and the contract suites that engines and backends pass."""
