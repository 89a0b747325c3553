"""BlockTrain: train and serve one model, block by block, on machines of different owners."""

__version__ = "0.1.0"
