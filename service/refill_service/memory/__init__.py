"""The memory of a pod: whose turn it is to have some, and what all its jobs share."""
