"""What is deployed: configuration, capacity, the Kubernetes layers, checkpoint storage and training runs."""
