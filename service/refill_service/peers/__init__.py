"""A pod's requests to the other pods."""
