"""How does a training process talk to pods? A connection for each kind of job, over one link to each pod."""
