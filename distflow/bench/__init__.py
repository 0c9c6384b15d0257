"""`distflow bench`: what the data plane does here, beside its limits and other systems; and `distflow profile`."""
