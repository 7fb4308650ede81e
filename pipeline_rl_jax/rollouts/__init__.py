"""Rollouts between the decode loop and the trainer: groups, streams, staleness, prompts used."""
