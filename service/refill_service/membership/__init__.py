"""How a job comes to all pods, and goes on after a restart, a checkpoint or another number of pods."""
