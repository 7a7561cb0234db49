"""What `refill` does at the command line, a file for each command."""
