"""A run file and what becomes of it: pure builders, and the component that deploys them."""
