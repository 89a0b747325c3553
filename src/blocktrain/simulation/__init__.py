"""Virtual networks and a virtual clock around the same decisions that the real services make."""
