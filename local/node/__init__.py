"""One real Kubernetes node made of child processes in a network namespace of its own, with an S3 server beside it."""
