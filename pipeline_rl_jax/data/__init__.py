"""Problems, tokenizer and the stream of prompts with a position that can be saved."""
