"""The coordinator's HTTP side: routes, signed requests, the dashboard's files."""
