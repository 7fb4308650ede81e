"""Saves and restores a run with Orbax."""
