"""Continues prompts with a language model: the tokenizer of the data, and the loop that chooses one token at a time."""
