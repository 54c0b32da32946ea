"""The checkpoint store. It needs no framework and knows nothing of training."""
