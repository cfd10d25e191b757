"""The paper's deep-learning tables: every optimizer tuned with one budget, then compared over seeds."""
