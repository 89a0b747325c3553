"""The coordinator: assigns blocks to workers, collects and merges their updates, keeps the ledger.

Decisions (`scheduling`, `deadlines`, `admission`) are pure; `store`, `blobs` and `ledger` keep what was
decided; `service` and `rounds` open a transaction, ask a pure function and write the answer; `app` speaks
HTTP. Never imports `worker` or `serving`.
"""
