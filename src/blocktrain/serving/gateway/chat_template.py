"""A conversation as plain text, for a model of bytes that knows no special tokens.

    {system}

    User: {question}

    Assistant: {answer}

    User: {question}

    Assistant:

System and developer messages stand without a name. The prompt ends with `ANSWER`, unless the last message is
to be continued, and the answer ends in front of the first of `STOPS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from blocktrain.serving.gateway.openai_messages import ChatMessage

SEPARATOR = "\n\n"
NAMES = {"user": "User: ", "assistant": "Assistant: ", "system": "", "developer": ""}
ANSWER = "Assistant: "
STOPS = ("\nUser:", "\nAssistant:")


def chat_prompt(messages: Sequence[ChatMessage], *, answer: bool = True, continued: bool = False) -> str:
    """The text to continue: behind `ANSWER`, behind the last message, or where that message ends."""
    parts = [NAMES[message.role] + message.text.strip() for message in messages]
    if continued:
        # As it stands: a space at its end is the client's, and says that a word was finished.
        parts[-1] = NAMES[messages[-1].role] + messages[-1].text
        return SEPARATOR.join(parts)
    return SEPARATOR.join([*parts, ANSWER] if answer else parts)
