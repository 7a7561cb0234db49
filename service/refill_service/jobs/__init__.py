"""Live jobs at one pod, whose policy decides as it is asked; and what planned jobs share with them: the pod's memory,
reads of chunks, who is a rank."""
