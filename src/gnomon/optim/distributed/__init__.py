"""Several ranks: process groups, the assignment of layers to ranks, ways of sharing, and plans of what they take."""
