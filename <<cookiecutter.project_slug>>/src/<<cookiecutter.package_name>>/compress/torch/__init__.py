"""What compression does in PyTorch."""
