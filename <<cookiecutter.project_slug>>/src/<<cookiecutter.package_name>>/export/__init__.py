"""Trained models as files for others."""
