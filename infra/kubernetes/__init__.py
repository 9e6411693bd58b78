"""The layers of the platform inside the cluster."""
