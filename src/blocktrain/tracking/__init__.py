"""Where the numbers of a run go: trackers, curves, the model card, the Hub."""
