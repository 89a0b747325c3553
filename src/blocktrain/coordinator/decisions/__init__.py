"""What the coordinator decides, as pure functions of facts and time."""
