"""Every decision of the cache, with no I/O: facts go in, decisions come out."""
