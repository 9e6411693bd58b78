"""The trainer as real processes against a real S3 server."""
