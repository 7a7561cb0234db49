"""What is the training loop doing? Loaders, their workers and trainers, seen from inside a dataset or a sampler."""
