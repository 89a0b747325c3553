"""A host that serves one or more blocks over TCP."""
