"""What was delivered, on disk."""
