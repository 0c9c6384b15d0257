"""Generation engines. Each passes the suite in `distflow.testing.engine_contract`."""
