"""Connects all agents of a job: a server on the batch host, its clients, and the store of the ranks."""
