"""What `blocktrain doctor` looks at, and what it says."""
