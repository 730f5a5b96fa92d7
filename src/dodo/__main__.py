"""`python -m dodo`: the command line."""

from dodo.cli import main

main()
