"""Whether an update counts: evidence, duplicates, reputation, verdicts, and who may join.

Pure functions of tensors, numbers and seeds; the coordinator and the judges keep the state around them.
"""
