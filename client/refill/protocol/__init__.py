"""What both sides of the wire agree on: a job's settings and the frames. No I/O in here."""
