"""The optimizer side: a train state and one compiled, sharded step."""
