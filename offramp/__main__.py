"""`python -m offramp`: the command line."""

from offramp.cli.app import main

main()
