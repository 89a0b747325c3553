"""Clients of a coordinator and of a gateway, for every program that talks to one."""
