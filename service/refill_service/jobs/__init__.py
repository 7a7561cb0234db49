"""One job at one pod: the path of a batch, and who has the pod's memory."""
