"""Orders that are computed ahead: which sample is at each position of an epoch is a function of the plan's settings."""
