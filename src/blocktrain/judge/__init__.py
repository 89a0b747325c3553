"""The judge as a program of its own, and the check of a ledger from outside."""
