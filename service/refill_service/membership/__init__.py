"""How a live job comes to all pods and ends on all, how its processes leave it, and what its runs have delivered."""
