"""Kronecker-factored preconditioners for the layers of a network: what INGD and KFAC are assembled from."""
