"""`refill top`: what pods say of themselves, live in a terminal."""
