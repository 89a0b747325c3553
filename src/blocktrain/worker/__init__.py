"""The worker: borrows assignments, trains, sends updates. Outbound connections only."""
