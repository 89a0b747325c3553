"""What the coordinator keeps: tables, blobs, the ledger, decoded weights."""
