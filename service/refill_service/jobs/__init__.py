"""One job at one pod: the path of a batch, and how a job is registered, and taken up after a restart."""
