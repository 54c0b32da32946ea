"""Starts ranks, watches them, and ends with their code."""
