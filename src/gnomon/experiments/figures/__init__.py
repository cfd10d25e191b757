"""The paper's figures: ``gnomon reproduce metric-nearness | log-det | gmm | rosenbrock``."""
