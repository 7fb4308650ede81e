"""Experiment configs: `base.py` holds every field, each experiment copies it and edits a few lines."""
