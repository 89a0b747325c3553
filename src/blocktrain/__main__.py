"""`python -m blocktrain` is the command line."""

from blocktrain.cli.main import main

main()
