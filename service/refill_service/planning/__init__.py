"""Which chunk size, which policy, how much memory? Answered without pods: `refill analyze` and `refill simulate`."""
