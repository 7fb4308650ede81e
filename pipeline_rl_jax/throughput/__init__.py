"""What the hardware could do and what a model asks of it."""
