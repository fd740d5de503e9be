"""A small tokenizer with a chat template, and conversations, for the tests of data=sft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_ONLY = CHATML.replace("{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' else '' }}")
TEXT = "the quick brown fox jumps over a lazy dog while"
WORDS = [*TEXT.split(), "Übermut", "", "rises\n42", "times"]


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Any:
    """Saves a byte-level BPE tokenizer of 300 ids in ``folder`` and returns it."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS), "user assistant system"], trainer)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")
    found.chat_template = template
    found.save_pretrained(folder)
    return found


def chats(number: int) -> list[dict[str, Any]]:
    """Returns records with ``messages`` of one to three answers of uneven length."""
    random = np.random.default_rng(number)

    def words() -> str:
        return " ".join(random.choice(WORDS, random.integers(1, 9)))

    def turns() -> list[dict[str, str]]:
        pairs = [("user", "assistant")] * int(random.integers(1, 4))
        return [{"role": "system", "content": words()}] + [{"role": r, "content": words()} for p in pairs for r in p]

    return [{"messages": turns()} for _ in range(number)]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_chat_model(folder: Path) -> None:
    """Saves a small Llama with this tokenizer."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=1024)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
