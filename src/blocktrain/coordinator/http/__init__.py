"""The coordinator's HTTP side: routes, signed requests, connections, the dashboard's files."""
