"""The front door for text: an OpenAI-compatible HTTP API over an engine."""
