"""Continues prompts with a checkpoint of a language model, in workers of any layout without pipeline stages."""
