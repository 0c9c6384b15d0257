"""`distflow bench`: what the data plane does here, beside its limits and other systems; `distflow profile`: how long devices take."""
