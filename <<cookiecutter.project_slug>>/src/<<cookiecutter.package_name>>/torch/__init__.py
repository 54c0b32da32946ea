"""The PyTorch wing."""
