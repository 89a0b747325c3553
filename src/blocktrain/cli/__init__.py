"""The command line: one function per verb, which reads config, wires objects and runs."""

from blocktrain.cli.main import main

__all__ = ["main"]
