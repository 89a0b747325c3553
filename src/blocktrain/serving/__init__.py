"""Stages that hold blocks, and the engine that turns their log-probs into text over real networks."""
