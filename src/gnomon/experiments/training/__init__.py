"""Training of networks as runs in folders: ``gnomon train | compare | tune``."""
