"""From finished groups to the batch of one optimizer step."""
