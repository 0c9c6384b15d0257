"""The agent of a host: starts its workers by a fork server, watches them, and deals with the agents of other hosts."""
