"""A conversation as plain text, for a model of bytes that knows no special tokens.

    {system}

    User: {question}

    Assistant: {answer}

    User: {question}

    Assistant:

System and developer messages stand without a name. The prompt ends with `ANSWER`, and the answer ends in
front of the first of `STOPS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from blocktrain.serving.gateway.openai_messages import ChatMessage

SEPARATOR = "\n\n"
NAMES = {"user": "User: ", "assistant": "Assistant: ", "system": "", "developer": ""}
ANSWER = "Assistant: "
STOPS = ("\nUser:", "\nAssistant:")


def chat_prompt(messages: Sequence[ChatMessage]) -> str:
    """The text to continue."""
    parts = [NAMES[message.role] + message.text.strip() for message in messages]
    return SEPARATOR.join([*parts, ANSWER])
