"""`blocktrain doctor`: readings of this machine and its network, and what they mean for a user."""
