"""Real ranks: one process a rank, from a warm pool; gloo on CPU, NCCL on GPUs."""
