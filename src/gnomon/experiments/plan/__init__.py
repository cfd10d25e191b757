"""The memory, messages and time of INGD on many ranks, computed from shapes: ``gnomon plan``."""
