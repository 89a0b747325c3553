"""What machines could train which model, and how: the cut, the codec, the length of a round."""
