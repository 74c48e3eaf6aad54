"""Rendezvous of the nodes of a job, and what they say to each other while it lives."""
