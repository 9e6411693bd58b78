"""The embedded platform: everything that the `local` stack needs, on one Linux machine."""
