"""Generation: slots that decode together, with weights that may change between two chunks."""
