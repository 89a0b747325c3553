"""Pictures of a real swarm's dashboard: `python -m tests.dashboard.pictures FOLDER`.

Three workers train two blocks, an attacker's noise is refused, a gateway serves a small model to chat with.
"""
