"""Smaller models of trained ones."""
