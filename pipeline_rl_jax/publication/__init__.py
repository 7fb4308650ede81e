"""Carries params from the trainer mesh to the generation mesh, version by version."""
