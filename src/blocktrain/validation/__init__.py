"""Whether an update counts: evidence, duplicates, rulings, the guard of a merge, reputation.

Pure functions of tensors, numbers and seeds; the coordinator and the judges keep the state around them.
"""
