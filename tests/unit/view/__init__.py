"""What a person sees of a run: pure parts, from objects and events as the API server and the trainer give them."""
