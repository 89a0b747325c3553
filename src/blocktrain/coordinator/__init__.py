"""The coordinator: assigns blocks to workers, collects and merges their updates, keeps the ledger.

`decisions` are pure functions of facts and time; `storage` keeps what was decided. The services
(`assignments`, `updates`, `judging`, `rounds`, `workers`) open a transaction, ask a pure function and write
the answer; `verdicts` is the one writer of verdicts; `http` speaks HTTP. Never imports `worker` or `serving`.
"""
