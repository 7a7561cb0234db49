"""The pod's two HTTP servers: routes, answers, limits, tokens and certificates."""
