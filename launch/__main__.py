"""`python -m distflow.launch` is `distflow`."""

from distflow.launch.cli import main

main()
