"""Programs of this project started and watched on one machine: swarm, demo, served stages."""
