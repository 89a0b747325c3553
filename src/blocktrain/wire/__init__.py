"""What crosses the network: identities and signatures, update frames, canonical hashes.

Bytes in, values out. Knows nothing of sockets, databases, torch or the clock (time is an argument).
"""
