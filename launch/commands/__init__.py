"""One module for each subcommand of `distflow`; each holds a click command named `command`."""
