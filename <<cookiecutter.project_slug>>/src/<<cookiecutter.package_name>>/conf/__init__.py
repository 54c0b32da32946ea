"""Hydra's configuration: train.yaml is the table of contents."""
