"""The demonstration: ``gnomon demo``."""
