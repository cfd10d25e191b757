"""The time and memory of training steps: ``gnomon bench``."""
