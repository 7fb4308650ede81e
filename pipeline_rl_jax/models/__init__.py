"""Models: the transformer of the Llama and Qwen families, and its files."""
