"""``refill demo``: a model trains through a cache of three pods, all on this machine."""
