"""What runs in the pod: the trainer and the preparation of its data."""
