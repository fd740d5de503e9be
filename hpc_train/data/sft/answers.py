"""Encodes the records of ``data=sft`` as token ids and marks those that are learnt: the answers.

- ``text``: every token is learnt.
- ``prompt`` and ``completion``: the tokens of the completion and the token that ends the text (EOS).
- ``messages``: what the chat template encloses in ``{% generation %}`` tags, as ``return_assistant_tokens_mask`` of
  transformers. For other templates the conversation is rendered up to each turn of the assistant, with and without
  that turn. Both must be prefixes of the whole conversation, and the difference between them is the answer, including
  the token that ends the turn; white space after this token is not learnt, since no answer that is generated has it.

Each text is encoded as a whole, as in the use of the model, and a token that is only partly in an answer is learnt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.sft.records import Record, form_of
from hpc_train.data.sft.tokenizer import SETTINGS, no_end, template_text, tokenizer_file
from hpc_train.errors import UserError

ANSWER = 1 << 31  # this bit of a stored token marks a token that is learnt
Tokens = NDArray[np.uint32]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_COLUMNS = "data.path"


class Encoder:
    """Encodes records with the tokenizer of a directory or of a ``tokenizer.json``.

    Args:
        tokenizer: the directory or file.
        template: the file of a chat template; None uses that of the tokenizer.
    """

    def __init__(self, tokenizer: str, template: str | None) -> None:
        self._path = tokenizer
        self._tokenizer = _load(tokenizer)
        self._template = None if template is None else template_text(template)

    def encode(self, record: Record) -> Tokens:
        """Returns the token ids of a record, with ``ANSWER`` set in those that are learnt.

        Raises:
            UserError: a column has another type, the chat template does not fit, or the tokenizer has no end token for
                a text or completion.
        """
        values = record.values
        form = form_of([name for name in values if values[name] is not None], record.name)
        if form == "messages":
            return self._conversation(record)
        if form == "text":
            parts = ("", values["text"])
        else:
            parts = (values["prompt"], values["completion"])
        if not all(isinstance(part, str) for part in parts):
            raise UserError(
                f"{record.name}: {form} is not text",
                where=_COLUMNS,
                fix="use strings, or the column messages for turns",
            )
        return self._completion(parts[0], parts[1])

    def _completion(self, prompt: str, completion: str) -> Tokens:
        encoded = self._tokenizer(prompt + completion, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        learnt = _inside(encoded["offset_mapping"], [(len(prompt), len(prompt) + len(completion))])
        if not prompt:
            learnt[:] = True
        end = self._tokenizer.eos_token_id
        if end is None:
            raise no_end(self._path)
        if not ids or ids[-1] != end:
            ids = [*ids, end]
            learnt = np.append(learnt, True)
        learnt[-1] = True
        return _marked(ids, learnt)

    def _conversation(self, record: Record) -> Tokens:
        messages = _messages(record)
        tools = record.values.get("tools") or None
        try:
            template = self._tokenizer.get_chat_template(self._template, tools)
            if _GENERATION.search(template):
                return self._tagged(messages, tools, template)
            text, spans = self._spans(messages, tools, template, record)
        except UserError:
            raise
        except Exception as error:  # Jinja and the template raise what they like
            raise UserError(
                f"{record.name}: the chat template failed: {type(error).__name__}: {error}",
                where="data.chat_template",
                fix="correct the messages, or data.chat_template=FILE.jinja, which accepts them",
            ) from error
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return _marked(encoded["input_ids"], _inside(encoded["offset_mapping"], spans))

    def _tagged(self, messages: Sequence[Any], tools: Any, template: str) -> Tokens:
        encoded = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        return _marked(encoded["input_ids"], np.array(encoded["assistant_masks"], dtype=bool))

    def _spans(
        self, messages: Sequence[Any], tools: Any, template: str, record: Record
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the rendered conversation and the first and last character (exclusive) of each answer."""

        def render(turns: Sequence[Any], prompt: bool) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    turns,
                    tools=tools,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=prompt,
                )
            )

        conversation = render(messages, False)
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                after = render(messages[: turn + 1], False)
                before = render(messages[:turn], True) if turn else _before_first(render, message, after)
                if before is None or not (conversation.startswith(after) and after.startswith(before)):
                    raise _unstable(record, turn)
                spans.append((len(before), len(after.rstrip())))
        return conversation, spans


_QUESTION = [{"role": "user", "content": "?"}]


def _before_first(render: Callable[[Sequence[Any], bool], str], message: Mapping[str, Any], text: str) -> str | None:
    """Returns the part of ``text``, a conversation that begins with the answer ``message``, before the answer.

    It ends with what the template puts before an answer, and is found without rendering an empty conversation, which
    many templates cannot. None if it is not found.
    """
    marker = render(_QUESTION, True).removeprefix(render(_QUESTION, False))
    if marker:
        head, match, _ = text.partition(marker)
        if match:
            return head + marker
        return None
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        position = text.find(content.strip())
    else:
        position = -1
    if position >= 0:
        return text[:position]
    return None


def _unstable(record: Record, turn: int) -> UserError:
    return UserError(
        f"{record.name}: the chat template renders the beginning of the conversation differently once message {turn} "
        "(an answer) or a later one follows, so the tokens of the answer are not known",
        where="data.chat_template",
        fix="data.chat_template=FILE.jinja with {% generation %} and {% endgeneration %} around the answers, or split "
        "the conversations so that each ends with its only answer",
    )


def _messages(record: Record) -> list[Mapping[str, Any]]:
    messages = record.values["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise UserError(
            f"{record.name}: messages is not a list of objects with role and content",
            where=_COLUMNS,
            fix='"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    # a table has every key in every message, None where a message lacks it
    return [{key: value for key, value in m.items() if value is not None or key == "content"} for m in messages]


def _inside(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Returns for each token with these character offsets whether it overlaps a span."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(starts), dtype=bool)
    for first, last in spans:
        inside |= (starts < last) & (ends > first) & (starts < ends)
    return inside


def _marked(ids: Sequence[int], learnt: NDArray[np.bool_]) -> Tokens:
    return np.array(ids, dtype=np.uint32) | np.where(learnt, np.uint32(ANSWER), np.uint32(0))


def _load(tokenizer: str) -> Any:
    import transformers

    file = tokenizer_file(tokenizer)
    try:
        if (file.parent / SETTINGS).is_file():
            return transformers.AutoTokenizer.from_pretrained(str(file.parent), local_files_only=True)
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:
        raise UserError(
            f"transformers cannot load the tokenizer {file.parent}: {type(error).__name__}: {error}",
            where="data.tokenizer",
            fix="data.tokenizer=a directory that save_pretrained of the tokenizer wrote",
        ) from error
