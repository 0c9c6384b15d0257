"""`distflow bench`: what the data plane does on this machine, beside its limits and beside other systems."""
